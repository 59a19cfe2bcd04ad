"""One chunk of tokens: its logits, the statistics of each row, and the gradient that the terms define.

    tile = Tile(...)             the logits of student and teachers over this rank's part of the vocabulary
    tile.start()                 computes sums over that part and starts to gather them from all ranks
    sums = tile.gathered_sums()  waits for the sums of all ranks
    tile.read(*sums)             computes the statistics of each row over the whole vocabulary
    term.add_to(tile, …)         each term reads the statistics and adds to the coefficients of the gradient
    tile.gradient()              overwrites the student's logits with the gradient with respect to hidden Wᵀ + bias

If `read` and `add_to` are compiled, they run on a second tile (`chunks.finish_rows`), and `set_gradient` gives the
coefficients of this second tile to the first. Terms work with rows, temperatures and global ids, but never with
shards or with elements of [C, V].

C rows of the chunk, V vocabulary on this rank, N or K ids per row, R ranks, X statistics of a row. q is the
student's probability, τ a temperature, l = (logit − reference) / τ.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence
from stillhouse.objective.signals import RowIndex, Signal, SparseSignal
from stillhouse.objective.tile.compiled import ROW_DEVICES, run_rows
from stillhouse.objective.tile.kernels import has_kernels, kernel_piece_sums
from stillhouse.objective.tile.pointwise import before_head, gradient
from stillhouse.objective.tile.statistics import RowStatistics, statistics
from stillhouse.objective.tile.sweeps import (
    columns_of,
    normalizers,
    sums_and_logits,
    sweep_gradient,
    sweep_normalized_sums,
    sweep_raw_sums,
)
from stillhouse.objective.tile.tile_plan import STUDENT, Column, PointwisePlan, TilePlan
from stillhouse.objective.vocab import AsyncAllGather, VocabShard

#: up to this number of ids per row, all pairs of ids are compared to find repeated ids
MOST_IDS = 128


@dataclass(frozen=True)
class TermResult:
    """A term's value per row of the chunk, without scale and weights, and further numbers per row for the metrics.

    `parts`: the summands of `value_C`, if the value is a sum. The keys of `statistics` and `parts` depend only on the
    term, never on the rows.
    """

    value_C: Tensor
    statistics: dict[str, Tensor]
    parts: dict[str, Tensor] = field(default_factory=dict)


class Tile:
    """The logits [C, V] of the student and of dense teachers (at least float32), and later the student's gradient.

    weights_C: the objective's weights.
    counted_C: a mask of the rows that count in the loss. All other rows may contain any values, and get no gradient.
    taken: maps some tensors over all tokens to their rows in this chunk.
    """

    _statistics: RowStatistics | None = None

    def __init__(
        self,
        plan: TilePlan,
        rows: RowIndex,
        weights_C: Tensor,
        counted_C: Tensor,
        tiles_CV: list[Tensor],
        vocabulary: int,
        shard: VocabShard | None,
        needs_gradient: bool,
        taken: Mapping[Tensor, Tensor] | None = None,
    ):
        self.rows, self.weights_C, self.counted_C = rows, weights_C, counted_C
        self.vocabulary, self.needs_gradient = vocabulary, needs_gradient
        self.tiles_CV = tiles_CV
        self.taken = taken or {}
        self._plan, self._pointwise, self._shard = plan, plan.pointwise, shard
        self._first = 0 if shard is None else shard.within(vocabulary)[0]
        self._coefficients: dict[Column, Tensor] = {}
        self._added: list[tuple[Tensor, Tensor]] = []
        self._rows_CX: Tensor | None = None
        self._at_ids: Sequence[Tensor] = ()

    @property
    def logits_CV(self) -> Tensor:
        """The student's logits; after `gradient`, the gradient."""
        return self.tiles_CV[STUDENT]

    def start(self) -> None:
        ids = [ids_C[:, None] if ids_C.dim() == 1 else ids_C for ids_C in map(self.take, self._plan.ids)]
        has_pieces = has_kernels(self._pointwise, self.tiles_CV)
        if has_pieces:
            sums_PCX = kernel_piece_sums(self._pointwise, self.tiles_CV)
        else:
            sums_PCX = sweep_raw_sums(self._pointwise, self.tiles_CV)[None]
        sums = [sums_PCX[0]]
        if ids or has_pieces:
            # the rows are the first dim of every tensor of a compiled function
            arguments = sums_PCX.transpose(0, 1), self.logits_CV, ids
            plan_and_first = self._pointwise, self._first
            sums = [run_rows(sums_and_logits, plan_and_first, *arguments, partly=[self.logits_CV])]
        sums += [self._outside_sums(*bucket) for bucket in self._plan.buckets]
        self._pieces = AsyncAllGather(sums[0] if len(sums) == 1 else torch.cat(sums, 1), self._shard)

    def gathered_sums(self) -> list[Tensor]:
        """Wait for the sums of all ranks, and compute the normalized sums if the plan has a second sweep."""
        gathered_RCX = self._pieces.wait()
        if not self._pointwise.two_sweep:
            return [gathered_RCX]
        raw_RCX, outside, _ = self._split(gathered_RCX)
        if raw_RCX.device.type in ROW_DEVICES:
            pieces = raw_RCX.transpose(0, 1), [sums_RC2.transpose(0, 1) for sums_RC2 in outside]
            normalizers_CX = run_rows(normalizers, self._pointwise, *pieces)
        else:
            self._statistics = statistics(self._pointwise, raw_RCX, outside)
            normalizers_CX = self._statistics.normalizers_CX
        sums_CX = sweep_normalized_sums(self._pointwise, self.tiles_CV, normalizers_CX)
        return [gathered_RCX, AsyncAllGather(sums_CX, self._shard).wait()]

    def read(self, gathered_RCX: Tensor, normalized_RCX: Tensor | None = None) -> None:
        """Compute the statistics that terms read, from the sums of all ranks."""
        raw_RCX, outside, entries = self._split(gathered_RCX)
        # an id's logit is on one rank; the other ranks send −inf
        self._entries = [logits_RCN.amax(0) for logits_RCN in entries]
        if self._statistics is None:
            self._statistics = statistics(self._pointwise, raw_RCX, outside)
        if normalized_RCX is not None:
            self._row_statistics.add_normalized(self._pointwise, normalized_RCX)

    def gradient(self, rounded_CV: Tensor | None = None) -> Tensor:
        """Return the gradient [C, V] in `rounded_CV` or, if `rounded_CV` is None, in place of the logits."""
        logits_CV = self.logits_CV
        result_CV = logits_CV if rounded_CV is None else rounded_CV
        if logits_CV.shape[1] == 0:
            return result_CV
        rows_CX = self.gradient_rows() if self._rows_CX is None else self._rows_CX
        if self._at_ids:
            sweep_gradient(self._pointwise, self.tiles_CV, rows_CX, rounded_CV)
            return result_CV.scatter_(1, *self._at_ids)
        # the values at ids are summed in the logits' dtype, in the tile of the logits, and rounded once
        at_ids = [] if rounded_CV is None else [(ids, self._gradient_in(ids, rows_CX)) for ids, _ in self._added]
        # write the gradient of tokens outside all buckets' ids to all columns, then overwrite the columns of the ids
        corrected = [self._gradient_at(signal, rows_CX) for signal, _ in self._plan.buckets]
        sweep_gradient(self._pointwise, self.tiles_CV, rows_CX, rounded_CV)
        for places_CK, values_CK in (*at_ids, *corrected):
            logits_CV.scatter_(1, places_CK, values_CK)
        for local_CN, values_CN in self._added:
            logits_CV.scatter_add_(1, local_CN, values_CN)
        if rounded_CV is not None:
            for places_CK, _ in (*at_ids, *corrected):
                rounded_CV.scatter_(1, places_CK, logits_CV.gather(1, places_CK).to(rounded_CV.dtype))
        return result_CV

    def gradient_rows(self) -> Tensor:
        """Return the columns of `plan.normalizers` and `plan.coefficients`, [C, X]."""
        rows = self._row_statistics
        zero_C = torch.zeros_like(rows.references[0])
        columns = self._coefficients | {("counted", 0): self.counted_C.to(zero_C.dtype)}
        for at in range(len(self._plan.buckets)):
            columns["outside_reference", at] = rows.outside_reference[at]
            columns["outside_log_mass", at] = rows.outside_log_mass[at]
        coefficients = [columns.get(column, zero_C) for column in self._pointwise.coefficients]
        return torch.cat([rows.normalizers_CX, torch.stack(coefficients, 1)], 1)

    def gradient_at_ids(self, rows_CX: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return the gradient at the ids of `add_at`: [columns, gradients], [C, N] each.

        With buckets or many ids, return the columns and values of every `add_at`, which `gradient` then adds.
        """
        if self._plan.buckets or sum(ids.shape[1] for ids, _ in self._added) > MOST_IDS:
            return [tensor for pair in self._added for tensor in pair]
        if not self._added:
            return []
        columns_CN, values_CN = (torch.cat(tensors, 1) for tensors in zip(*self._added, strict=True))
        # every occurrence of a repeated column gets the sum of the column's values
        is_same_CNN = columns_CN[:, :, None] == columns_CN[:, None, :]
        values_CN = torch.where(is_same_CNN, values_CN[:, None, :], 0.0).sum(2)
        return [columns_CN, (self._gradient_in(columns_CN, rows_CX) + values_CN).to(dtype)]

    def set_gradient(self, rows_CX: Tensor, *at_ids: Tensor) -> None:
        """Use the `gradient_rows` and `gradient_at_ids` that another tile of the same chunk has returned."""
        self._rows_CX = rows_CX
        if self._plan.buckets or sum(columns_CN.shape[1] for columns_CN in at_ids[::2]) > MOST_IDS:
            self._added = list(zip(at_ids[::2], at_ids[1::2], strict=True))
        else:
            self._at_ids = at_ids

    # the statistics that terms read

    def take(self, per_token: Tensor) -> Tensor:
        """Return the chunk's rows of a tensor over all tokens."""
        return self.taken[per_token] if per_token in self.taken else per_token[self.rows]

    def log_normalizer(self, temperature: float) -> Tensor:
        """Return log Σ e^(logit / τ), [C]."""
        log_mass_C = self._row_statistics.student_log_mass[self._plan.softmax(temperature)]
        return self._row_statistics.references[0] / temperature + log_mass_C

    def entropy(self, temperature: float) -> Tensor:
        """Return the student's entropy in nats, [C]."""
        return self._row_statistics.student_entropy[self._plan.softmax(temperature)]

    def mean_log_prob(self) -> Tensor:
        """Return the mean of log q over the vocabulary, [C]."""
        assert self._row_statistics.mean_log_prob is not None
        return self._row_statistics.mean_log_prob

    def log_probs_at(self, ids: Tensor, temperature: float) -> Tensor:
        """Return log q at the chunk's ids, [C, N], −inf outside the vocabulary. ids: of all tokens, [T] or [T, N]."""
        gap_CN = self._entries[self._plan.logits_at(ids)] - self._row_statistics.references[0][:, None]
        return gap_CN / temperature - self._row_statistics.student_log_mass[self._plan.softmax(temperature)][:, None]

    def is_argmax(self, ids: Tensor) -> Tensor:
        """Return a mask [C, N] of the ids that have the student's highest probability."""
        return self._entries[self._plan.logits_at(ids)] == self._row_statistics.references[0][:, None]

    def divergence(self, divergence: Divergence, signal: Signal, temperature: float) -> tuple[Tensor, Tensor]:
        """Return Σf and Σq·h (`divergence.py`) of a divergence that is not a weighted sum, [C] each."""
        at = self._plan.pair(divergence, signal, temperature)
        return self._row_statistics.values[at], self._row_statistics.slopes[at]

    def teacher_entropy(self, signal: Signal, temperature: float) -> Tensor:
        return self._row_statistics.teacher_entropy[self._plan.teacher(signal, temperature)]

    def agreement(self, signal: Signal) -> Tensor:
        """Return 1 where a dense teacher and the student have the same argmax, 0 elsewhere, [C]."""
        return self._row_statistics.both_top[self._plan.tile(signal) - 1]

    def tail(self, signal: SparseSignal, temperature: float) -> Tensor:
        """Return the log of the student's probability of all tokens outside the signal's ids together, [C]."""
        return self._row_statistics.tail[self._plan.outside(signal, temperature)]

    # the summands that terms add to the gradient at token v; a coefficient is one number per row

    def add_probability(self, temperature: float, coefficient_C: Tensor) -> None:
        """Add coefficient · q_v to the gradient."""
        self._add(("probability", self._plan.softmax(temperature)), coefficient_C)

    def add_log_probability(self, temperature: float, coefficient_C: Tensor) -> None:
        """Add coefficient · q_v log q_v to the gradient."""
        self._add(("log_probability", self._plan.entropy(temperature)), coefficient_C)

    def add_slope(self, divergence: Divergence, signal: Signal, temperature: float, coefficient_C: Tensor) -> None:
        """Add coefficient · q_v h_v to the gradient."""
        self._add(("slope", self._plan.pair(divergence, signal, temperature)), coefficient_C)

    def add_outside(self, signal: SparseSignal, temperature: float, coefficient_C: Tensor) -> None:
        """Add coefficient · q_v / q(outside) to the gradient, for the tokens outside the signal's ids."""
        self._add(("outside", self._plan.outside(signal, temperature)), coefficient_C)

    def add_uniform(self, coefficient_C: Tensor) -> None:
        """Add coefficient / (size of the whole vocabulary) to the gradient, for every token."""
        assert self._row_statistics.vocabulary is not None
        self._add(("uniform", 0), coefficient_C / self._row_statistics.vocabulary)

    def add_at(self, ids_CN: Tensor, values_CN: Tensor) -> None:
        """Add values to the gradient at ids. Values of a repeated id add up; an absent id is ignored."""
        if self.logits_CV.shape[1] == 0:
            return
        local_CN, is_here_CN = columns_of(ids_CN, self._first, self.logits_CV)
        scale, softcap = self._pointwise.scale, self._pointwise.softcap
        values_CN = before_head(values_CN, self.logits_CV.gather(1, local_CN), scale, softcap)
        self._added.append((local_CN, torch.where(is_here_CN & self.counted_C[:, None], values_CN, 0.0)))

    @property
    def _row_statistics(self) -> RowStatistics:
        assert self._statistics is not None
        return self._statistics

    def _outside_sums(self, signal: SparseSignal, softmax: int) -> Tensor:
        """Return the largest logit and Σe^l outside the signal's ids, [C, 2].

        The logits at the ids are set to −inf for the sum and then restored. Subtracting the sum over the ids from the
        sum over all tokens would lose all digits in rows where the ids hold nearly all of the mass.
        """
        plan, logits_CV = PointwisePlan(temperatures=(self._pointwise.temperatures[softmax],)), self.logits_CV
        places_CK, held_C1 = self._places(signal)
        if logits_CV.shape[1]:
            kept_CK = logits_CV.gather(1, places_CK)
            logits_CV.scatter_(1, places_CK, torch.where(held_C1, -math.inf, kept_CK))
        sums = dict(zip(plan.raw_sums, sweep_raw_sums(plan, [logits_CV]).unbind(1), strict=True))
        if logits_CV.shape[1]:
            logits_CV.scatter_(1, places_CK, kept_CK)
        return torch.stack([sums["reference", STUDENT], sums["largest", STUDENT] + sums["student_others", 0]], 1)

    def _split(self, gathered_RCX: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the raw sums, the sums outside the ids of each bucket, and the logits at ids."""
        widths = [len(self._pointwise.raw_sums)]
        widths += [1 if ids.dim() == 1 else ids.shape[1] for ids in self._plan.ids]
        widths += [2] * len(self._plan.buckets)
        raw_RCX, *rest = gathered_RCX.split(widths, 2)
        ids = len(self._plan.ids)
        return raw_RCX, rest[ids:], rest[:ids]

    def _places(self, signal: SparseSignal) -> tuple[Tensor, Tensor]:
        """Return the columns [C, K] of the signal's ids on this rank, and a mask of rows that have such ids, [C, 1].

        An id on another rank is replaced by the row's first id on this rank, or by column 0 if no id is on this rank.
        The replacement is harmless, because a column that occurs twice gets the same value twice.
        """
        local_CK, is_here_CK = columns_of(self.take(signal.ids_TK), self._first, self.logits_CV)
        first_C1 = local_CK.gather(1, is_here_CK.byte().argmax(1, keepdim=True))
        return torch.where(is_here_CK, local_CK, first_C1), is_here_CK.any(1, keepdim=True)

    def _gradient_at(self, signal: SparseSignal, rows_CX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns [C, K] of a bucket signal's ids and the gradient in these columns, without `_added`."""
        places_CK, held_C1 = self._places(signal)
        outside = []
        for other, _ in self._plan.buckets:
            is_other_CK = held_C1.expand_as(places_CK)
            if other is not signal:  # True where a column belongs to one of the ids of `other`
                other_CK, has_other_C1 = self._places(other)
                is_other_CV = torch.zeros_like(self.logits_CV, dtype=torch.bool)
                is_other_CK = is_other_CV.scatter_(1, other_CK, has_other_C1.expand_as(other_CK)).gather(1, places_CK)
            outside.append(~is_other_CK)
        return places_CK, self._gradient_in(places_CK, rows_CX, outside)

    def _gradient_in(self, columns_CK: Tensor, rows_CX: Tensor, outside_CK: Sequence[Tensor] | None = None) -> Tensor:
        """Return `pointwise.gradient` in these columns, [C, K]."""
        tiles_CK = [tile_CV.gather(1, columns_CK) for tile_CV in self.tiles_CV]
        gradient(self._pointwise, tiles_CK, rows_CX, outside_BV=outside_CK)
        return tiles_CK[0]

    def _add(self, column: Column, coefficient_C: Tensor) -> None:
        self._coefficients[column] = self._coefficients.get(column, 0.0) + coefficient_C
