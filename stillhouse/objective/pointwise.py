"""The pointwise work on a block of logits: sums over the vocabulary, and the gradient.

    raw_sums     one sweep: per softmax Σe^l and Σe^l·l with l = (logit − reference) / τ, the reference being the
                 row's largest logit here; the moments of divergences that can be renormalised; and what else a
                 `Plan` asks for. Sums over any part of the vocabulary: a shard of it, all of it.
    mixed_sums   a second sweep, for divergences that need both normalisers in every element: Σf and Σq·h.
    gradient     ∂loss/∂logits = Σ_τ q_τ·(a + b·log q_τ) + Σ_pairs w·q·h + Σ_buckets c·q/q(outside) + u
                 with coefficients per row: all that terms do to the logits, but for single ids.

Plain functions of tensors, which `compiled.py` makes into one kernel each: log-probabilities live in registers.

B rows of a block, V vocabulary here, X named numbers of a row, in the order that the plan says.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.objective.formulas import expect
from stillhouse.objective.plan import Plan

Rows = dict[str, Tensor]


def raw_sums(plan: Plan, tiles_BV: Sequence[Tensor]) -> Tensor:
    """[B, V] each → [B, X] of `plan.raw_sums`."""
    references = [_reference(tile_BV) for tile_BV in tiles_BV]
    sums: Rows = {f"reference/{at}": reference_B1[:, 0] for at, reference_B1 in enumerate(references)}
    if tiles_BV[0].shape[1] == 0:
        return torch.stack([sums.get(name, torch.zeros_like(sums["reference/0"])) for name in plan.raw_sums], 1)
    gaps = [tile_BV - finite(reference_B1) for tile_BV, reference_B1 in zip(tiles_BV, references, strict=True)]
    students = [_cooled(gaps[0], temperature) for temperature in plan.temperatures]
    teachers = [_cooled(gaps[tile], temperature) for tile, temperature in plan.teachers]
    for side, softmaxes in (("student", students), ("teacher", teachers)):
        for at, log_BV in enumerate(softmaxes):
            mass_BV = log_BV.exp()
            sums |= {f"{side}_mass/{at}": mass_BV.sum(1), f"{side}_mean/{at}": expect(mass_BV, log_BV).sum(1)}
    for at, divergence in plan.renormalizable.items():
        _, teacher, student = plan.pairs[at]
        moments = divergence.moments(teachers[teacher], students[student])
        sums |= {f"moment/{at}/{n}": each_BV.sum(1) for n, each_BV in enumerate(moments)}
    for tile in range(1, plan.tiles):
        # two gaps, neither above 0, add up to 0 where both are
        sums[f"both_top/{tile}"] = ((gaps[0] + gaps[tile]).amax(1) == 0).to(gaps[0].dtype)
    if plan.uniform:
        sums |= {"logits_sum": gaps[0].sum(1), "count": torch.ones_like(gaps[0]).sum(1)}
    return torch.stack([sums[name] for name in plan.raw_sums], 1)


def mixed_sums(plan: Plan, tiles_BV: Sequence[Tensor], normalizers_BX: Tensor) -> Tensor:
    """Σf and Σq·h of each of `plan.mixed`, [B, 2·pairs]."""
    rows = _named(plan.normalizers, normalizers_BX)
    columns = []
    for at in plan.mixed:
        divergence, teacher, student = plan.pairs[at]
        log_p_BV = _teacher_log_probs(plan, teacher, tiles_BV, rows)
        log_q_BV = _student_log_probs(plan, student, tiles_BV, rows)
        columns += [divergence.value(log_p_BV, log_q_BV).sum(1), divergence.weighted_slope(log_p_BV, log_q_BV).sum(1)]
    return torch.stack(columns, 1)


def gradient(
    plan: Plan, tiles_BV: Sequence[Tensor], rows_BX: Tensor, outside_BV: Sequence[Tensor] | None = None
) -> None:
    """Overwrites the first tile, the student's logits, with the gradient with respect to hidden Wᵀ + bias.

    rows_BX: `plan.normalizers` and `plan.coefficients`. outside_BV: of each bucket, true where a token is outside its
    ids; None: everywhere.
    """
    rows = _named([*plan.normalizers, *plan.coefficients], rows_BX)
    logits_BV = tiles_BV[0]
    log_qs = [_student_log_probs(plan, at, tiles_BV, rows) for at in range(len(plan.temperatures))]
    grad_BV = torch.zeros_like(logits_BV)
    for at, log_q_BV in enumerate(log_qs):
        q_BV = log_q_BV.exp()
        grad_BV = grad_BV + rows[f"probability/{at}"] * q_BV
        if at in plan.entropic:
            grad_BV = grad_BV + rows[f"log_probability/{at}"] * expect(q_BV, log_q_BV)
    for at, (divergence, teacher, student) in enumerate(plan.pairs):
        log_p_BV = _teacher_log_probs(plan, teacher, tiles_BV, rows)
        slope_BV = divergence.weighted_slope(log_p_BV, log_qs[student])
        # a row that does not count may hold anything, NaN included
        grad_BV = grad_BV + torch.where(rows[f"slope/{at}"] == 0, 0.0, rows[f"slope/{at}"] * slope_BV)
    for at, softmax in enumerate(plan.buckets):
        gap_BV = _cooled(logits_BV - rows[f"outside_reference/{at}"], plan.temperatures[softmax])
        share_BV = (gap_BV - rows[f"outside_log_mass/{at}"]).exp()
        if outside_BV is not None:
            share_BV = torch.where(outside_BV[at], share_BV, 0.0)
        grad_BV = grad_BV + rows[f"outside/{at}"] * share_BV
    if plan.uniform:
        grad_BV = grad_BV + rows["uniform"]
    logits_BV.copy_(before_head(grad_BV, logits_BV, plan.scale, plan.softcap))


def before_head(grad: Tensor, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """The gradient with respect to hidden Wᵀ + bias from the one with respect to the logits."""
    if softcap is not None:
        grad = grad * (1 - (logits / softcap).square())
    return grad if scale == 1.0 else grad * scale


def _student_log_probs(plan: Plan, softmax: int, tiles_BV: Sequence[Tensor], rows: Rows) -> Tensor:
    gap_BV = _cooled(tiles_BV[0] - rows["reference/0"], plan.temperatures[softmax])
    return gap_BV - rows[f"student_log_mass/{softmax}"]


def _teacher_log_probs(plan: Plan, softmax: int, tiles_BV: Sequence[Tensor], rows: Rows) -> Tensor:
    tile, temperature = plan.teachers[softmax]
    return _cooled(tiles_BV[tile] - rows[f"reference/{tile}"], temperature) - rows[f"teacher_log_mass/{softmax}"]


def _named(names: list[str], columns_BX: Tensor) -> Rows:
    """Columns [B, 1] by their names."""
    return dict(zip(names, columns_BX.split(1, 1), strict=True))


def _reference(logits_BV: Tensor) -> Tensor:
    """The largest logit of each row, [B, 1]; −inf where there is none."""
    if logits_BV.shape[1] == 0:
        return logits_BV.new_full((logits_BV.shape[0], 1), -math.inf)
    return logits_BV.amax(1, keepdim=True)


def finite(reference: Tensor) -> Tensor:
    """A reference to subtract: of a row without any mass here, 0."""
    return torch.where(reference == -math.inf, 0.0, reference)


def _cooled(gap: Tensor, temperature: float) -> Tensor:
    return gap if temperature == 1.0 else gap / temperature
