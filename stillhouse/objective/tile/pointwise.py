"""The pointwise work on a block of logits: sums over the vocabulary, and the gradient.

    raw_sums     the first sweep over the logits. Its sums cover this rank's part of the vocabulary: for each softmax
                 Σe^l and Σe^l·l, where l = (logit − reference) / τ and the reference is the row's largest logit in
                 this part; for KL divergences, sums over unnormalized e^l, which `statistics.py` normalizes; and all
                 further sums in `PointwisePlan.raw_sums`.
    normalized_sums   a second sweep, for divergences whose f needs normalized p and q: Σf and Σq·h.
    log_mean     before the two sweeps: the logits of the mean of several teachers' distributions (`Mixture`).
    gradient     ∂loss/∂logits = Σ_τ q_τ·(a + b·log q_τ) + Σ_pairs w·q·h + Σ_buckets c·q/q(outside) + u
                 with coefficients a, b, w, c, u per row: the gradient of all terms except at single ids.

p is the teacher's probability, q the student's, τ the temperature. `divergence.py` defines f and h.

If student and teacher are close, the difference of their logits has more correct digits than the difference of their
masses Σe^l or of their log-probabilities. So log(q/p) is computed as (student's l − teacher's l) − log(student's Σe^l
/ teacher's Σe^l), and this last logarithm is computed from a sum of differences.

The four functions are plain functions of tensors. `compiled.py` compiles each of them into one kernel, which keeps
log-probabilities in registers.

B rows of a block, V vocabulary on this rank, X statistics of a row, in the plan's order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.objective.divergence import Pivot, Sides, sides
from stillhouse.objective.numerics import difference, expect, row_max
from stillhouse.objective.tile.tile_plan import STUDENT, Columns, PointwisePlan


def raw_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor]) -> Tensor:
    """Return the columns of `plan.raw_sums` [B, X] from tiles [B, V]. Tiles [B, P, V] of P pieces give [B, P, X]."""
    references = [row_max(tile_BV) for tile_BV in tiles_BV]
    sums: Columns = {("reference", at): reference_B1[..., 0] for at, reference_B1 in enumerate(references)}
    if tiles_BV[0].shape[-1] == 0:
        zero_B = torch.zeros_like(sums["reference", STUDENT])
        return torch.stack([sums.get(column, zero_B) for column in plan.raw_sums], -1)
    lowest = torch.finfo(tiles_BV[0].dtype).min
    gaps = [
        tile_BV - reference_B1.clamp(min=lowest) for tile_BV, reference_B1 in zip(tiles_BV, references, strict=True)
    ]
    largest = [gap_BV == 0 for gap_BV in gaps]
    sums |= {("largest", at): is_largest_BV.to(gaps[0].dtype).sum(-1) for at, is_largest_BV in enumerate(largest)}
    students = [_cooled(gaps[0], temperature) for temperature in plan.temperatures]
    teachers = [_cooled(gaps[tile], temperature) for tile, temperature in plan.teachers]
    for at, log_BV in enumerate(students):
        sums["student_others", at], sums["student_mean", at] = _softmax_sums(log_BV, largest[STUDENT])
    for at, ((tile, _), log_BV) in enumerate(zip(plan.teachers, teachers, strict=True)):
        sums["teacher_others", at], sums["teacher_mean", at] = _softmax_sums(log_BV, largest[tile])
    both = {(at, to): sides(teachers[at], students[to], students[to] - teachers[at]) for at, to in plan.couples}
    for at, pair in enumerate(both.values()):
        sums["mass_gap", at] = difference(pair.p, pair.q, pair.ratio).sum(-1)
    for at, divergence in plan.renormalizable.items():
        pair = both[plan.pairs[at][1:]]
        first_BV, _, ratio_BV = divergence.directed(pair)
        sums["excess", at] = divergence.balanced(pair).sum(-1)
        sums["log_ratio", at] = expect(first_BV, ratio_BV).sum(-1)
    for at in range(1, plan.tiles):
        # gaps are ≤ 0, so the sum of two gaps is 0 only where both are 0
        sums["both_top", at] = ((gaps[0] + gaps[at]).amax(-1) == 0).to(gaps[0].dtype)
    if plan.uniform:
        sums |= {("logits_sum", 0): gaps[0].sum(-1), ("count", 0): torch.ones_like(gaps[0]).sum(-1)}
    return torch.stack([sums[column] for column in plan.raw_sums], -1)


def normalized_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor], normalizers_BX: Tensor) -> Tensor:
    """Return the sums of each pair in `plan.two_sweep`, [B, X]: Σf and Σq·h.

    Tiles [B, P, V] of P pieces and normalizers [B, 1, X] give [B, P, X].
    """
    rows = dict(zip(plan.normalizers, normalizers_BX.split(1, -1), strict=True))
    both = _sides(plan, tiles_BV, rows)
    columns: list[Tensor] = []
    for at in plan.two_sweep:
        divergence, teacher, student = plan.pairs[at]
        pair = both[teacher, student]
        columns += [divergence.balanced(pair).sum(-1), divergence.balanced_slope(pair).sum(-1)]
    return torch.stack(columns, -1)


def gradient(
    plan: PointwisePlan,
    tiles_BV: Sequence[Tensor],
    rows_BX: Tensor,
    out_BV: Tensor | None = None,
    outside_BV: Sequence[Tensor] | None = None,
) -> None:
    """Write the gradient with respect to hidden Wᵀ + bias to `out_BV`, rounded to its dtype.

    out_BV: by default the first tile, the student's logits.
    rows_BX: the columns of `plan.normalizers` and `plan.coefficients`. A row with `counted` = 0 may contain any
        values, and its gradient is 0.
    outside_BV: a mask for each bucket, True at tokens outside the ids of the bucket's signal; by default, all tokens
        count as outside.
    """
    rows = dict(zip([*plan.normalizers, *plan.coefficients], rows_BX.split(1, -1), strict=True))
    logits_BV = tiles_BV[0]
    both = _sides(plan, tiles_BV, rows)
    grad_BV = torch.zeros_like(logits_BV)
    for at, temperature in enumerate(plan.temperatures):
        log_q_BV = _cooled(logits_BV - rows["reference", STUDENT], temperature) - rows["student_log_mass", at]
        q_BV = log_q_BV.exp()
        grad_BV = grad_BV + rows["probability", at] * q_BV
        if at in plan.entropic:
            grad_BV = grad_BV + rows["log_probability", at] * expect(q_BV, log_q_BV)
    for at, (divergence, teacher, student) in enumerate(plan.pairs):
        slope_BV = divergence.balanced_slope(both[teacher, student])
        # the slope of a row that does not count can be NaN, because the row may contain any values
        grad_BV = grad_BV + torch.where(rows["slope", at] == 0, 0.0, rows["slope", at] * slope_BV)
    for at, softmax in enumerate(plan.buckets):
        gap_BV = _cooled(logits_BV - rows["outside_reference", at], plan.temperatures[softmax])
        share_BV = (gap_BV - rows["outside_log_mass", at]).exp()
        if outside_BV is not None:
            share_BV = torch.where(outside_BV[at], share_BV, 0.0)
        grad_BV = grad_BV + rows["outside", at] * share_BV
    if plan.uniform:
        grad_BV = grad_BV + rows["uniform", 0]
    grad_BV = before_head(grad_BV, logits_BV, plan.scale, plan.softcap)
    (logits_BV if out_BV is None else out_BV).copy_(torch.where(rows["counted", 0] == 0, 0.0, grad_BV))


def log_mean(plan: PointwisePlan, tiles_BV: Sequence[Tensor], rows_BX: Tensor) -> None:
    """Overwrite the first tile with τ·log Σ_i e^(l_i − c_i), with l_i = (logits of tile i − reference_i) / τ.

    τ is the plan's only temperature. rows_BX: reference_i and c_i of each tile, [B, 2·tiles].
    """
    (temperature,) = plan.temperatures
    columns = iter(rows_BX.split(1, 1))
    logs = [_cooled(tile_BV - next(columns), temperature) - next(columns) for tile_BV in tiles_BV]
    total_BV = logs[0]
    for log_BV in logs[1:]:
        total_BV = torch.logaddexp(total_BV, log_BV)
    tiles_BV[0].copy_(total_BV * temperature)


def before_head(grad: Tensor, logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the gradient with respect to hidden Wᵀ + bias, given the gradient with respect to the logits."""
    if softcap is not None:
        grad = grad * (1 - (logits / softcap).square())
    return grad if scale == 1.0 else grad * scale


def _softmax_sums(log_BV: Tensor, is_largest_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σe^l without the row's largest logits (`log_sum_exp` adds them, since their e^l is 1), and Σe^l·l."""
    mass_BV = log_BV.exp()
    return torch.where(is_largest_BV, 0.0, mass_BV).sum(-1), expect(mass_BV, log_BV).sum(-1)


def _sides(plan: PointwisePlan, tiles_BV: Sequence[Tensor], rows: Columns) -> dict[tuple[int, int], Sides]:
    both = {}
    for at, (teacher, student) in enumerate(plan.couples):
        tile, temperature = plan.teachers[teacher]
        gap_p_BV = _cooled(tiles_BV[tile] - rows["reference", tile], temperature)
        gap_q_BV = _cooled(tiles_BV[STUDENT] - rows["reference", STUDENT], plan.temperatures[student])
        ratio_B1 = rows["mass_ratio", at]
        both[teacher, student] = sides(
            gap_p_BV - rows["teacher_log_mass", teacher],
            gap_q_BV - rows["student_log_mass", student],
            gap_q_BV - gap_p_BV - ratio_B1,
            # the pivot represents a token that is the argmax of teacher and student: l is 0 in both softmaxes
            Pivot(-rows["student_log_mass", student], -ratio_B1),
        )
    return both


def _cooled(gap: Tensor, temperature: float) -> Tensor:
    return gap if temperature == 1.0 else gap / temperature
