"""From the raw sums of a vocabulary's pieces to what terms ask of a row: normalisers, entropies, divergences.

A piece is what one rank holds; alone, there is one. Its sums are relative to its own largest logit: put together,
each is shifted to the largest of all, then to the normaliser, by the same rule (`Renormalizable.renormalized` for
moments).

R pieces, C rows of a chunk, X named sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillhouse.objective.plan import Plan
from stillhouse.objective.pointwise import finite

Rows = dict[str, Tensor]


@dataclass
class RowStatistics:
    """Numbers of every row of a chunk, over the whole vocabulary; [C] each, in the order of the plan's places.

    references: the largest logit of each tile.
    student_log_mass, teacher_log_mass: log Σ e^((logit − reference) / τ) of each softmax.
    student_entropy, teacher_entropy: in nats.
    both_top: of each dense teacher, 1 where one token is the likeliest on both sides.
    outside_reference, outside_log_mass: as above, over the outside of each bucket's ids (finite where it is empty).
    tail: the student's log-probability of that outside.
    mean_log_prob: the mean over the vocabulary of log q.
    vocabulary: the number of tokens in it.
    values, slopes: Σf and Σq·h of each pair.
    """

    references: list[Tensor]
    student_log_mass: list[Tensor]
    student_entropy: list[Tensor]
    teacher_log_mass: list[Tensor]
    teacher_entropy: list[Tensor]
    both_top: list[Tensor]
    outside_reference: list[Tensor] = field(default_factory=list)
    outside_log_mass: list[Tensor] = field(default_factory=list)
    tail: list[Tensor] = field(default_factory=list)
    mean_log_prob: Tensor | None = None
    vocabulary: Tensor | None = None
    values: dict[int, Tensor] = field(default_factory=dict)
    slopes: dict[int, Tensor] = field(default_factory=dict)

    def normalizers(self) -> Tensor:
        """[C, X] of `plan.normalizers`."""
        return torch.stack([*self.references, *self.student_log_mass, *self.teacher_log_mass], 1)

    def add_mixed(self, plan: Plan, sums_RCX: Tensor) -> None:
        """Put in what `pointwise.mixed_sums` found on every piece."""
        columns = iter(sums_RCX.sum(0).unbind(1))
        for at in plan.mixed:
            self.values[at], self.slopes[at] = next(columns), next(columns)


def statistics(plan: Plan, raw_RCX: Tensor, outside_RC2: Sequence[Tensor] = ()) -> RowStatistics:
    """Pieces put together. raw_RCX: `pointwise.raw_sums` of every piece; outside_RC2: of each bucket, the largest
    logit and Σe^l outside its ids.
    """
    raw = dict(zip(plan.raw_sums, raw_RCX.unbind(2), strict=True))
    largest = [raw[f"reference/{tile}"] for tile in range(plan.tiles)]
    references = [finite(each_RC.amax(0)) for each_RC in largest]
    shifts = [_shift(each_RC, reference_C) for each_RC, reference_C in zip(largest, references, strict=True)]
    students = [
        _softmax(raw[f"student_mass/{at}"], raw[f"student_mean/{at}"], shifts[0] / temperature)
        for at, temperature in enumerate(plan.temperatures)
    ]
    teachers = [
        _softmax(raw[f"teacher_mass/{at}"], raw[f"teacher_mean/{at}"], shifts[tile] / temperature)
        for at, (tile, temperature) in enumerate(plan.teachers)
    ]
    result = RowStatistics(
        references,
        *_columns(students),
        *_columns(teachers),
        both_top=[
            (raw[f"both_top/{tile}"] * (largest[0] == references[0]) * (largest[tile] == references[tile])).amax(0)
            for tile in range(1, plan.tiles)
        ],
    )
    for softmax, sums_RC2 in zip(plan.buckets, outside_RC2, strict=True):
        _add_outside(plan, softmax, sums_RC2, result)
    for at in plan.renormalizable:
        _add_pair(plan, at, raw, shifts, result)
    if plan.uniform:
        result.vocabulary = raw["count"].sum(0)
        total_C = (raw["logits_sum"] + shifts[0] * raw["count"]).sum(0)
        result.mean_log_prob = total_C / result.vocabulary - result.student_log_mass[plan.temperatures.index(1.0)]
    return result


def _softmax(mass_RC: Tensor, mean_RC: Tensor, shift_RC: Tensor) -> tuple[Tensor, Tensor]:
    """log Σe^l and the entropy, [C] each, from Σe^l and Σe^l·l of pieces whose l are to be shifted."""
    factor_RC = shift_RC.exp()
    mass_C = (factor_RC * mass_RC).sum(0)
    mean_C = (factor_RC * (mean_RC + shift_RC * mass_RC)).sum(0) / mass_C
    return mass_C.log(), mass_C.log() - mean_C


def _add_outside(plan: Plan, softmax: int, sums_RC2: Tensor, result: RowStatistics) -> None:
    temperature = plan.temperatures[softmax]
    largest_RC, mass_RC = sums_RC2.unbind(2)
    reference_C = finite(largest_RC.amax(0))
    mass_C = ((_shift(largest_RC, reference_C) / temperature).exp() * mass_RC).sum(0)
    gap_C = (reference_C - result.references[0]) / temperature
    result.tail.append(gap_C + mass_C.log() - result.student_log_mass[softmax])
    result.outside_reference.append(reference_C)
    result.outside_log_mass.append(torch.where(mass_C == 0, 0.0, mass_C.log()))


def _add_pair(plan: Plan, at: int, raw: Rows, shifts: list[Tensor], result: RowStatistics) -> None:
    divergence, (_, teacher, student) = plan.renormalizable[at], plan.pairs[at]
    tile, temperature = plan.teachers[teacher]
    moments = tuple(raw[f"moment/{at}/{n}"] for n in range(divergence.size))
    moments = divergence.renormalized(moments, shifts[tile] / temperature, shifts[0] / temperature)
    moments = tuple(each_RC.sum(0) for each_RC in moments)
    moments = divergence.renormalized(moments, -result.teacher_log_mass[teacher], -result.student_log_mass[student])
    result.values[at], result.slopes[at] = divergence.from_moments(moments)


def _shift(largest_RC: Tensor, reference_C: Tensor) -> Tensor:
    """From each piece's reference to the one of all. A piece without mass has nothing to shift."""
    return torch.where(largest_RC == -torch.inf, 0.0, largest_RC - reference_C)


def _columns(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [first for first, _ in pairs], [second for _, second in pairs]
