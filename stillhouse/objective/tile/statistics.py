"""Computes the statistics of each row (normalizers, entropies, divergences) from the raw sums of all ranks.

A piece is a part of the vocabulary: the part of one rank, or the columns of one program of a Triton kernel. The sums
of a piece are relative to the piece's largest logits. They are shifted to the largest logits of all pieces, and then
normalized. If the shifts of student and teacher are close, the sums of small differences get a correction for the
difference of the two shifts. If the shifts are not close, these sums are recomputed from the masses Σe^l, since no
digits cancel in this case (`_Couple`).

R pieces, C rows of a chunk, X named sums. p is the teacher's probability, q the student's,
l = (logit − reference) / temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective.divergence import KullbackLeibler
from stillhouse.objective.numerics import excess, expect, finite, log_sum_exp
from stillhouse.objective.tile.tile_plan import STUDENT, Columns, PointwisePlan


@dataclass
class RowStatistics:
    """Numbers of every row of a chunk, over the whole vocabulary; [C] each, in the order of the plan's indices.

    normalizers_CX: the columns of `plan.normalizers`, [C, X].
    references: the largest logit of each tile.
    student_log_mass, teacher_log_mass: log Σe^l of each softmax.
    student_entropy, teacher_entropy: the entropy of each softmax in nats.
    mass_ratio: log(Σe^l of the student / Σe^l of the teacher) of each couple (`PointwisePlan.couples`).
    both_top: for each dense teacher, 1 where teacher and student have the same argmax.
    outside_reference, outside_log_mass: the student's largest logit and log Σe^l over the tokens outside each
        bucket's ids (both 0 if all tokens are among the ids).
    tail: the log of the student's probability of all tokens outside each bucket's ids together.
    vocabulary, mean_log_prob: the number of tokens of the vocabulary, and the mean of log q over these tokens.
    values, slopes: Σf and Σq·h of each pair, with the balanced f and h (`divergence.py`).
    """

    normalizers_CX: Tensor
    references: list[Tensor]
    student_log_mass: list[Tensor]
    student_entropy: list[Tensor]
    teacher_log_mass: list[Tensor]
    teacher_entropy: list[Tensor]
    mass_ratio: list[Tensor]
    both_top: list[Tensor]
    outside_reference: list[Tensor]
    outside_log_mass: list[Tensor]
    tail: list[Tensor]
    vocabulary: Tensor | None
    mean_log_prob: Tensor | None
    values: dict[int, Tensor]
    slopes: dict[int, Tensor]

    def add_normalized(self, plan: PointwisePlan, sums_RCX: Tensor) -> None:
        """Add the results of `pointwise.normalized_sums` of all pieces."""
        columns = iter(sums_RCX.unbind(2))
        for at in plan.two_sweep:
            self.values[at], self.slopes[at] = next(columns).sum(0), next(columns).sum(0)


def statistics(plan: PointwisePlan, raw_RCX: Tensor, outside_RC2: Sequence[Tensor] = ()) -> RowStatistics:
    """Return the statistics of the rows from the sums of all pieces.

    raw_RCX: `pointwise.raw_sums` of every piece.
    outside_RC2: for each bucket, the largest logit and Σe^l over the tokens outside the bucket's ids.
    """
    pieces = _pieces(plan, raw_RCX)
    raw, references = pieces.raw, pieces.references
    log_masses = [softmax.log_mass_C for softmax in pieces.students]
    teacher_log_masses = [softmax.log_mass_C for softmax in pieces.teachers]
    ratios = [_mass_ratio(couple) for couple in pieces.couples.values()]
    outside_references, outside_log_masses, tails = [], [], []
    for softmax, sums_RC2 in zip(plan.buckets, outside_RC2, strict=True):
        temperature = plan.temperatures[softmax]
        largest_RC, mass_RC = sums_RC2.unbind(2)
        reference_C = finite(largest_RC.amax(0))
        mass_C = ((_shift(largest_RC, reference_C) / temperature).exp() * mass_RC).sum(0)
        gap_C = (reference_C - references[STUDENT]) / temperature
        tails.append(gap_C + mass_C.log() - log_masses[softmax])
        outside_references.append(reference_C)
        outside_log_masses.append(torch.where(mass_C == 0, 0.0, mass_C.log()))
    values, slopes = {}, {}
    for at, divergence in plan.renormalizable.items():
        couple = pieces.directed(plan, at, divergence)
        mass_C, ratio_C = couple.a.mass_C, _mass_ratio(couple)
        excess_C, log_ratio_C = (sum_C / mass_C for sum_C in couple.shifted(raw["excess", at], raw["log_ratio", at]))
        close_C = excess_C - excess(torch.ones_like(ratio_C), ratio_C.exp(), ratio_C)
        values[at] = torch.where(ratio_C.abs() <= 1, close_C, ratio_C - log_ratio_C)
        # Σq·h is Σ(q − p) = 0 for forward KL; for reverse KL, it is Σq·log(q/p), the value
        slopes[at] = values[at] if divergence.student_first else torch.zeros_like(values[at])
    vocabulary_C = mean_C = None
    if plan.uniform:
        vocabulary_C = raw["count", 0].sum(0)
        total_C = (raw["logits_sum", 0] + pieces.shifts[STUDENT] * raw["count", 0]).sum(0)
        mean_C = total_C / vocabulary_C - log_masses[plan.temperatures.index(1.0)]
    return RowStatistics(
        torch.stack([*references, *log_masses, *teacher_log_masses, *ratios], 1),
        references,
        log_masses,
        [softmax.log_mass_C - softmax.mean_C / softmax.mass_C for softmax in pieces.students],
        teacher_log_masses,
        [softmax.log_mass_C - softmax.mean_C / softmax.mass_C for softmax in pieces.teachers],
        ratios,
        pieces.both_top,
        outside_references,
        outside_log_masses,
        tails,
        vocabulary_C,
        mean_C,
        values,
        slopes,
    )


def merged(plan: PointwisePlan, raw_RCX: Tensor) -> Tensor:
    """Return the raw sums [C, X] of the union of several pieces, as of one piece."""
    pieces = _pieces(plan, raw_RCX)
    raw = pieces.raw
    sums: Columns = {("reference", tile): raw["reference", tile].amax(0) for tile in range(plan.tiles)}
    sums |= {("both_top", tile): both_C for tile, both_C in enumerate(pieces.both_top, start=1)}
    for at, softmax in enumerate(pieces.students):
        sums["student_others", at], sums["student_mean", at] = softmax.others_C, softmax.mean_C
    for at, softmax in enumerate(pieces.teachers):
        sums["teacher_others", at], sums["teacher_mean", at] = softmax.others_C, softmax.mean_C
    for tile in range(plan.tiles):
        sums["largest", tile] = torch.where(pieces.shifts[tile] == 0, raw["largest", tile], 0.0).sum(0)
    sums |= {("mass_gap", at): couple.gap_C for at, couple in enumerate(pieces.couples.values())}
    for at, divergence in plan.renormalizable.items():
        couple = pieces.directed(plan, at, divergence)
        sums["excess", at], sums["log_ratio", at] = couple.shifted(raw["excess", at], raw["log_ratio", at])
    if plan.uniform:
        count_RC = raw["count", 0]
        sums["logits_sum", 0] = (raw["logits_sum", 0] + pieces.shifts[STUDENT] * count_RC).sum(0)
        sums["count", 0] = count_RC.sum(0)
    return torch.stack([sums[column] for column in plan.raw_sums], 1)


class _Softmax(NamedTuple):
    """The sums of one softmax: of each piece before its shift, and of all pieces after their shifts.

    shift_RC: (the piece's largest logit − that of all pieces) / τ ≤ 0, which is added to every l of the piece.
    mass_RC, mass_C: Σe^l. others_C: Σe^l over the e^l that are not 1. mean_C: Σe^l·l. log_mass_C: log Σe^l.
    """

    shift_RC: Tensor
    mass_RC: Tensor
    mass_C: Tensor
    others_C: Tensor
    mean_C: Tensor
    log_mass_C: Tensor


class _Couple(NamedTuple):
    """Two softmaxes that a divergence compares; a and b are their unnormalized e^l, t = log(b/a).

    gap_RC, gap_C: Σ(b − a) of each piece before its shift, and of all pieces after their shifts.

    The shifts s_a and s_b turn a into a·e^s_a and b into b·e^s_b, so c = s_b − s_a is added to t. Where |c| ≤ 1,

        Σ(b − a)       → e^s_a (Σ(b − a) + (e^c − 1) Σb)
        Σ a(e^t−1−t)   → e^s_a (Σ a(e^t−1−t) + (e^c − 1) Σ(b − a) + (e^c − 1 − c) Σa)
    """

    a: _Softmax
    b: _Softmax
    gap_RC: Tensor
    gap_C: Tensor

    def shifted(self, excess_RC: Tensor, log_ratio_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ a(e^t − 1 − t) and Σ a·t of all pieces, [C] each."""
        scale_RC, c_RC = self.a.shift_RC.exp(), self.b.shift_RC - self.a.shift_RC
        small_RC = c_RC.clamp(-1, 1)
        grown_RC, second_order_RC = torch.expm1(small_RC), excess(torch.ones_like(c_RC), small_RC.exp(), small_RC)
        close_RC = expect(scale_RC, excess_RC + grown_RC * self.gap_RC + second_order_RC * self.a.mass_RC)
        mean_RC = log_ratio_RC + (1 + c_RC) * self.a.mass_RC
        far_RC = self.b.shift_RC.exp() * self.b.mass_RC - expect(scale_RC, mean_RC)
        excess_C = torch.where(c_RC.abs() <= 1, close_RC, far_RC).sum(0)
        return excess_C, expect(scale_RC, log_ratio_RC + c_RC * self.a.mass_RC).sum(0)


class _Pieces(NamedTuple):
    """The raw sums of all pieces by their names, [R, C] each, and the sums of all pieces together.

    references: the largest logit of each tile over all pieces, [C]; 0 in a row without mass.
    shifts: for each tile, each piece's reference minus the common reference.
    both_top: for each dense teacher, 1 where its largest logit and the student's are in the same column, [C].
    """

    raw: Columns
    references: list[Tensor]
    shifts: list[Tensor]
    students: list[_Softmax]
    teachers: list[_Softmax]
    both_top: list[Tensor]
    couples: dict[tuple[int, int], _Couple]

    def directed(self, plan: PointwisePlan, at: int, divergence: KullbackLeibler) -> _Couple:
        """Return the couple of the pair `at`, with the a and b of its divergence KL(a‖b)."""
        couple = self.couples[plan.pairs[at][1:]]
        return _couple(couple.b, couple.a, -couple.gap_RC) if divergence.student_first else couple


def _pieces(plan: PointwisePlan, raw_RCX: Tensor) -> _Pieces:
    raw = dict(zip(plan.raw_sums, raw_RCX.unbind(2), strict=True))
    largest = [raw["reference", tile] for tile in range(plan.tiles)]
    references = [finite(largest_RC.amax(0)) for largest_RC in largest]
    shifts = [_shift(largest_RC, top_C) for largest_RC, top_C in zip(largest, references, strict=True)]
    students = [
        _softmax(raw["largest", STUDENT], raw["student_others", at], raw["student_mean", at], shifts[0] / temperature)
        for at, temperature in enumerate(plan.temperatures)
    ]
    teachers = [
        _softmax(raw["largest", tile], raw["teacher_others", at], raw["teacher_mean", at], shifts[tile] / temperature)
        for at, (tile, temperature) in enumerate(plan.teachers)
    ]
    both_top = []
    for tile in range(1, plan.tiles):
        student_top_RC, teacher_top_RC = (largest[at] == references[at] for at in (STUDENT, tile))
        both_top.append((raw["both_top", tile] * student_top_RC * teacher_top_RC).amax(0))
    couples = {
        (teacher, student): _couple(teachers[teacher], students[student], raw["mass_gap", at])
        for at, (teacher, student) in enumerate(plan.couples)
    }
    return _Pieces(raw, references, shifts, students, teachers, both_top, couples)


def _softmax(largest_RC: Tensor, others_RC: Tensor, mean_RC: Tensor, shift_RC: Tensor) -> _Softmax:
    """Return the sums of a softmax from those of its pieces.

    largest_RC: the number of e^l that are 1. others_RC: Σe^l over the e^l that are not 1. mean_RC: Σe^l·l.
    """
    mass_RC, scale_RC = largest_RC + others_RC, shift_RC.exp()
    others_C = torch.where(shift_RC == 0, others_RC, scale_RC * mass_RC).sum(0)
    mean_C = (scale_RC * (mean_RC + shift_RC * mass_RC)).sum(0)
    log_mass_C = log_sum_exp(torch.where(shift_RC == 0, largest_RC, 0.0).sum(0), others_C)
    return _Softmax(shift_RC, mass_RC, (scale_RC * mass_RC).sum(0), others_C, mean_C, log_mass_C)


def _couple(a: _Softmax, b: _Softmax, gap_RC: Tensor) -> _Couple:
    scale_RC, c_RC = a.shift_RC.exp(), b.shift_RC - a.shift_RC
    close_RC = scale_RC * (gap_RC + torch.expm1(c_RC.clamp(-1, 1)) * b.mass_RC)
    far_RC = b.shift_RC.exp() * b.mass_RC - scale_RC * a.mass_RC
    return _Couple(a, b, gap_RC, torch.where(c_RC.abs() <= 1, close_RC, far_RC).sum(0))


def _mass_ratio(couple: _Couple) -> Tensor:
    """Return log(Σb / Σa) over all pieces, [C]."""
    change_C = couple.gap_C / couple.a.mass_C
    return torch.where(change_C.abs() < 0.5, torch.log1p(change_C), couple.b.log_mass_C - couple.a.log_mass_C)


def _shift(largest_RC: Tensor, reference_C: Tensor) -> Tensor:
    """Return (each piece's reference − the common reference) ≤ 0, or 0 for a piece without mass."""
    return torch.where(largest_RC == -torch.inf, 0.0, largest_RC - reference_C)
