"""Computes the statistics of each row (normalizers, entropies, divergences) from the raw sums of all ranks.

A piece is one rank's part of the vocabulary; without sharding there is one piece. The sums of a piece are relative to
the piece's largest logits. They are shifted to the largest logits of all pieces, and then normalized. If student and
teacher have close shifts, the sums of small differences get a correction for the difference of the two shifts.
Otherwise these sums are recomputed from the masses, since no digits cancel there (`_Couple`).

R pieces, C rows of a chunk, X named sums. p is the teacher's probability, q the student's,
l = (logit − reference) / temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from stillhouse.objective.acceptance_rate import Acceptance, PieceSums, acceptance_statistics
from stillhouse.objective.divergence import KullbackLeibler
from stillhouse.objective.numerics import excess, expect, log_sum_exp
from stillhouse.objective.tile.pointwise import finite
from stillhouse.objective.tile.tile_plan import (
    STUDENT,
    Columns,
    PairIndex,
    PointwisePlan,
    StudentSoftmax,
    TeacherSoftmax,
)


@dataclass
class RowStatistics:
    """Numbers of every row of a chunk, over the whole vocabulary; [C] each, in the order of the plan's indices.

    references: the largest logit of each tile.
    student_log_mass, teacher_log_mass: log Σe^l of each softmax.
    student_entropy, teacher_entropy: in nats.
    mass_ratio: log(Σe^l of the student / Σe^l of the teacher) of each couple.
    both_top: for each dense teacher, 1 where teacher and student have the same argmax.
    outside_reference, outside_log_mass: the student's largest logit and log Σe^l over the tokens outside each
        bucket's ids (finite if there is no such token).
    tail: the student's log-probability of all tokens outside each bucket's ids together.
    mean_log_prob: the mean over the vocabulary of log q.
    vocabulary: the number of tokens of the vocabulary.
    values, slopes: Σf and Σq·h of each pair, balanced (`divergence.py`).
    acceptances: of the pairs in `plan.acceptances`.
    """

    references: list[Tensor]
    student_log_mass: list[Tensor]
    student_entropy: list[Tensor]
    teacher_log_mass: list[Tensor]
    teacher_entropy: list[Tensor]
    both_top: list[Tensor]
    mass_ratio: list[Tensor] = field(default_factory=list)
    outside_reference: list[Tensor] = field(default_factory=list)
    outside_log_mass: list[Tensor] = field(default_factory=list)
    tail: list[Tensor] = field(default_factory=list)
    mean_log_prob: Tensor | None = None
    vocabulary: Tensor | None = None
    values: dict[PairIndex, Tensor] = field(default_factory=dict)
    slopes: dict[PairIndex, Tensor] = field(default_factory=dict)
    acceptances: dict[PairIndex, Acceptance] = field(default_factory=dict)

    def normalizers(self) -> Tensor:
        """Return the columns of `plan.normalizers`, [C, X]."""
        return torch.stack([*self.references, *self.student_log_mass, *self.teacher_log_mass, *self.mass_ratio], 1)

    def add_normalized(self, plan: PointwisePlan, sums_RCX: Tensor) -> None:
        """Add the results of `pointwise.normalized_sums` of all pieces."""
        columns = iter(sums_RCX.unbind(2))
        for at in plan.two_sweep:
            if at in plan.acceptances:
                self.acceptances[at] = acceptance = acceptance_statistics(
                    PieceSums(*islice(columns, len(PieceSums._fields)))
                )
                # the gradient has no further part in proportion to q
                self.values[at], self.slopes[at] = acceptance.value, torch.zeros_like(acceptance.value)
            else:
                self.values[at], self.slopes[at] = next(columns).sum(0), next(columns).sum(0)


def statistics(plan: PointwisePlan, raw_RCX: Tensor, outside_RC2: Sequence[Tensor] = ()) -> RowStatistics:
    """raw_RCX: `pointwise.raw_sums` of every piece.
    outside_RC2: for each bucket, the largest logit and Σe^l over the tokens outside the bucket's ids.
    """
    pieces = _Pieces.of(plan, raw_RCX)
    raw, students, teachers = pieces.raw, pieces.students, pieces.teachers
    result = RowStatistics(
        pieces.references,
        [softmax.log_mass() for softmax in students],
        [softmax.entropy() for softmax in students],
        [softmax.log_mass() for softmax in teachers],
        [softmax.entropy() for softmax in teachers],
        both_top=[pieces.both_top(tile) for tile in range(1, plan.tiles)],
    )
    for softmax, sums_RC2 in zip(plan.buckets, outside_RC2, strict=True):
        _add_outside(plan, softmax, sums_RC2, result)
    couples = pieces.couples(plan)
    result.mass_ratio += [couple.mass_ratio() for couple in couples.values()]
    for at, divergence in plan.renormalizable.items():
        couple = couples[plan.pairs[at][1:]].directed(divergence)
        result.values[at] = value_C = couple.divergence(raw["excess", at], raw["log_ratio", at])
        # Σ(q − p) is 0; Σq·log(q/p) is reverse KL
        result.slopes[at] = value_C if divergence.student_first else torch.zeros_like(value_C)
    if plan.uniform:
        result.vocabulary = raw["count", 0].sum(0)
        total_C = (raw["logits_sum", 0] + pieces.shifts[STUDENT] * raw["count", 0]).sum(0)
        result.mean_log_prob = total_C / result.vocabulary - result.student_log_mass[plan.temperatures.index(1.0)]
    return result


def merged(plan: PointwisePlan, raw_RCX: Tensor) -> Tensor:
    """Return the raw sums of several pieces as those of one piece, [C, X]."""
    pieces = _Pieces.of(plan, raw_RCX)
    sums: Columns = {("reference", tile): pieces.raw["reference", tile].amax(0) for tile in range(plan.tiles)}
    sums |= {("both_top", tile): pieces.both_top(tile) for tile in range(1, plan.tiles)}
    for at, softmax in enumerate(pieces.students):
        sums["student_others", at], sums["student_mean", at] = softmax.global_others(), softmax.global_mean()
    for at, softmax in enumerate(pieces.teachers):
        sums["teacher_others", at], sums["teacher_mean", at] = softmax.global_others(), softmax.global_mean()
    for tile in range(plan.tiles):
        holds_largest_RC = pieces.shifts[tile] == 0
        sums["largest", tile] = torch.where(holds_largest_RC, pieces.raw["largest", tile], 0.0).sum(0)
    couples = pieces.couples(plan)
    sums |= {("mass_gap", at): couple.global_gap() for at, couple in enumerate(couples.values())}
    for at, divergence in plan.renormalizable.items():
        couple = couples[plan.pairs[at][1:]].directed(divergence)
        log_ratio_RC = pieces.raw["log_ratio", at]
        sums["excess", at] = couple.global_excess(pieces.raw["excess", at], log_ratio_RC)
        sums["log_ratio", at] = couple.global_log_ratio(log_ratio_RC)
    if plan.uniform:
        count_RC = pieces.raw["count", 0]
        sums["logits_sum", 0] = (pieces.raw["logits_sum", 0] + pieces.shifts[STUDENT] * count_RC).sum(0)
        sums["count", 0] = count_RC.sum(0)
    return torch.stack([sums[column] for column in plan.raw_sums], 1)


@dataclass(frozen=True)
class _Pieces:
    """The raw sums of all pieces by their names, [R, C] each, and the shifts to common references.

    references: the largest logit of each tile over all pieces, [C]; 0 in a row without mass.
    shifts: of each tile, from each piece's reference to the common one.
    """

    raw: Columns
    references: list[Tensor]
    shifts: list[Tensor]
    students: "list[_Softmax]"
    teachers: "list[_Softmax]"

    @classmethod
    def of(cls, plan: PointwisePlan, raw_RCX: Tensor) -> "_Pieces":
        raw = dict(zip(plan.raw_sums, raw_RCX.unbind(2), strict=True))
        largest = [raw["reference", tile] for tile in range(plan.tiles)]
        references = [finite(largest_RC.amax(0)) for largest_RC in largest]
        shifts = [_shift(largest_RC, top_C) for largest_RC, top_C in zip(largest, references, strict=True)]
        students = [
            _Softmax(
                raw["largest", STUDENT], raw["student_others", at], raw["student_mean", at], shifts[0] / temperature
            )
            for at, temperature in enumerate(plan.temperatures)
        ]
        teachers = [
            _Softmax(
                raw["largest", tile], raw["teacher_others", at], raw["teacher_mean", at], shifts[tile] / temperature
            )
            for at, (tile, temperature) in enumerate(plan.teachers)
        ]
        return cls(raw, references, shifts, students, teachers)

    def both_top(self, tile: int) -> Tensor:
        """1 where the largest logits of the tile and of the student are in the same column, [C]."""
        is_top_RC = [self.raw["reference", at] == self.references[at] for at in (STUDENT, tile)]
        return (self.raw["both_top", tile] * is_top_RC[0] * is_top_RC[1]).amax(0)

    def couples(self, plan: PointwisePlan) -> "dict[tuple[TeacherSoftmax, StudentSoftmax], _Couple]":
        return {
            (teacher, student): _Couple(self.teachers[teacher], self.students[student], self.raw["mass_gap", at])
            for at, (teacher, student) in enumerate(plan.couples)
        }


@dataclass(frozen=True)
class _Softmax:
    """Sums of the pieces of one softmax, and the shift of each piece's l that is not yet applied, [R, C] each.

    largest: the number of e^l that are 1. others: Σe^l over the other e^l. mean: Σe^l·l.
    """

    largest: Tensor
    others: Tensor
    mean: Tensor
    shift: Tensor

    @property
    def mass(self) -> Tensor:
        """Σe^l of each piece, not shifted."""
        return self.largest + self.others

    @property
    def global_mass(self) -> Tensor:
        """Σe^l over all pieces, shifted, [C]."""
        return (self.shift.exp() * self.mass).sum(0)

    def log_mass(self) -> Tensor:
        """log Σe^l, [C]."""
        largest_C = torch.where(self.shift == 0, self.largest, 0.0).sum(0)
        return log_sum_exp(largest_C, self.global_others())

    def global_others(self) -> Tensor:
        """Σe^l over all pieces without those that are 1 after the shift, [C]."""
        return torch.where(self.shift == 0, self.others, self.shift.exp() * self.mass).sum(0)

    def global_mean(self) -> Tensor:
        """Σe^l·l over all pieces, shifted, [C]."""
        return (self.shift.exp() * (self.mean + self.shift * self.mass)).sum(0)

    def entropy(self) -> Tensor:
        return self.log_mass() - self.global_mean() / self.global_mass


@dataclass(frozen=True)
class _Couple:
    """Two softmaxes that a divergence compares; a and b are their unnormalized e^l, t = log(b/a).

    first: the softmax of a. second: that of b. mass_gap: Σ(b − a) of each piece, not shifted, [R, C].

    The shifts s_a and s_b turn a into a·e^s_a and b into b·e^s_b, so c = s_b − s_a is added to t. Where |c| ≤ 1,

        Σ(b − a)       → e^s_a (Σ(b − a) + (e^c − 1) Σb)
        Σ a(e^t−1−t)   → e^s_a (Σ a(e^t−1−t) + (e^c − 1) Σ(b − a) + (e^c − 1 − c) Σa)
    """

    first: _Softmax
    second: _Softmax
    mass_gap: Tensor

    def directed(self, divergence: KullbackLeibler) -> "_Couple":
        """Return the couple with the a and b of the divergence, which is KL(a‖b)."""
        return _Couple(self.second, self.first, -self.mass_gap) if divergence.student_first else self

    def mass_ratio(self) -> Tensor:
        """log(Σb / Σa) over all pieces, [C]."""
        change_C = self.global_gap() / self.first.global_mass
        return torch.where(
            change_C.abs() < 0.5, torch.log1p(change_C), self.second.log_mass() - self.first.log_mass()
        )

    def divergence(self, excess_RC: Tensor, log_ratio_RC: Tensor) -> Tensor:
        """KL(a‖b) of the normalized a and b, [C], from Σ a(e^t − 1 − t) and Σ a·t of each piece."""
        mass_C, ratio_C = self.first.global_mass, self.mass_ratio()
        excess_C = self.global_excess(excess_RC, log_ratio_RC) / mass_C
        mean_C = self.global_log_ratio(log_ratio_RC) / mass_C
        close_C = excess_C - excess(torch.ones_like(ratio_C), ratio_C.exp(), ratio_C)
        return torch.where(ratio_C.abs() <= 1, close_C, ratio_C - mean_C)

    @property
    def _shift(self) -> Tensor:
        return self.second.shift - self.first.shift

    def global_gap(self) -> Tensor:
        mass_a_RC, mass_b_RC, c_RC = self.first.shift.exp(), self.second.shift.exp(), self._shift
        close_RC = mass_a_RC * (self.mass_gap + torch.expm1(c_RC.clamp(-1, 1)) * self.second.mass)
        far_RC = mass_b_RC * self.second.mass - mass_a_RC * self.first.mass
        return torch.where(c_RC.abs() <= 1, close_RC, far_RC).sum(0)

    def global_log_ratio(self, log_ratio_RC: Tensor) -> Tensor:
        return expect(self.first.shift.exp(), log_ratio_RC + self._shift * self.first.mass).sum(0)

    def global_excess(self, excess_RC: Tensor, log_ratio_RC: Tensor) -> Tensor:
        mass_a_RC, mass_b_RC, c_RC = self.first.shift.exp(), self.second.shift.exp(), self._shift
        small_RC = c_RC.clamp(-1, 1)
        grown_RC, second_order_RC = torch.expm1(small_RC), excess(torch.ones_like(c_RC), small_RC.exp(), small_RC)
        close_RC = expect(mass_a_RC, excess_RC + grown_RC * self.mass_gap + second_order_RC * self.first.mass)
        mean_RC = log_ratio_RC + (1 + c_RC) * self.first.mass
        far_RC = mass_b_RC * self.second.mass - expect(mass_a_RC, mean_RC)
        return torch.where(c_RC.abs() <= 1, close_RC, far_RC).sum(0)


def _add_outside(plan: PointwisePlan, softmax: StudentSoftmax, sums_RC2: Tensor, result: RowStatistics) -> None:
    temperature = plan.temperatures[softmax]
    largest_RC, mass_RC = sums_RC2.unbind(2)
    reference_C = finite(largest_RC.amax(0))
    mass_C = ((_shift(largest_RC, reference_C) / temperature).exp() * mass_RC).sum(0)
    gap_C = (reference_C - result.references[0]) / temperature
    result.tail.append(gap_C + mass_C.log() - result.student_log_mass[softmax])
    result.outside_reference.append(reference_C)
    result.outside_log_mass.append(torch.where(mass_C == 0, 0.0, mass_C.log()))


def _shift(largest_RC: Tensor, reference_C: Tensor) -> Tensor:
    """Return the shift from each piece's reference to the common reference; 0 for a piece without mass."""
    return torch.where(largest_RC == -torch.inf, 0.0, largest_RC - reference_C)
