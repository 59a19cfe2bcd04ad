"""Vocabulary shards: the rows of an output head on this rank, the objective's collectives, and the top K over ranks.

This is the only file of the objective that uses torch.distributed. The rows of a head are sharded over R ranks, whose
numbers of rows can differ. Hidden states, labels and teacher signals are replicated. For each chunk of C tokens,
every rank computes S sums per token over its own rows, and one all-gather of R·C·S numbers (`AsyncAllGather`) gives
the sums of all ranks to every rank. Backward all-reduces the hidden states' gradient once if
`VocabShard.reduce_hidden_grad` is True. A rank with fewer than K rows pads its top K candidates with the id −1 and
the logit −∞.

C rows of a chunk, V vocabulary of this rank, K ids per row, N = R·K candidates of a row, X numbers of a row.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from stillhouse.objective.numerics import log_sum_exp

Range = tuple[int, int]

# torch 2.13 has renamed this function, and the old name gives a warning
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class VocabShard:
    """Rows `start:stop` of the whole vocabulary are on this rank; the ranks of `group` hold the other rows.

    The range is given explicitly and never computed from the number of ranks, because DTensor's ceil split and a
    balanced split differ (10 rows over 4 ranks: 3, 3, 3, 1 or 3, 3, 2, 2). Keep one object as long as the layout does
    not change, because the first use of an object exchanges the borders with the other ranks.

    `group`: None if this rank has all rows.
    `reduce_hidden_grad`: True if the objective sums the gradient of the hidden states over the group, False if the
    layer before the head sums it, as with sequence parallelism.
    """

    start: int
    stop: int
    group: ProcessGroup | None
    reduce_hidden_grad: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard({self.start}, {self.stop}): expected 0 ≤ start ≤ stop")

    @property
    def is_alone(self) -> bool:
        return self.group is None or self.group.size() == 1

    @cached_property
    def borders(self) -> tuple[Range, ...]:
        """(start, stop) of every rank of the group. The first access runs a collective."""
        is_on_gpu = not self.is_alone and str(dist.get_backend(self.group)) == "nccl"
        border = torch.tensor([self.start, self.stop], device="cuda" if is_on_gpu else "cpu")
        borders = tuple((start, stop) for start, stop in AsyncAllGather(border, self).wait().tolist())
        held = sorted(border for border in borders if border[0] < border[1])
        expected_start = 0
        for start, stop in held:
            if start != expected_start:
                raise ValueError(
                    f"vocabulary shards {', '.join(f'{a}:{b}' for a, b in borders)}: expected rows from 0 on that "
                    f"follow one another; row {min(start, expected_start)} is held "
                    + ("by no rank" if start > expected_start else "by two ranks")
                )
            expected_start = stop
        return borders

    @property
    def rows(self) -> int:
        """The number of rows of the global head."""
        return max(stop for _, stop in self.borders)

    @property
    def most_rows(self) -> int:
        """The largest number of rows on a rank."""
        return max(stop - start for start, stop in self.borders)

    def within(self, vocabulary: int) -> Range:
        """Return (start, stop) of this rank's rows among the first `vocabulary` rows."""
        return min(self.start, vocabulary), min(self.stop, vocabulary)


def check_shard(shard: VocabShard, rows: int) -> None:
    """Require that the shard's range has `rows` rows. rows: the number of rows on this rank."""
    if shard.stop - shard.start != rows:
        raise ValueError(
            f"VocabShard({shard.start}, {shard.stop}) with {rows} rows: expected {shard.stop - shard.start} rows"
        )


class AsyncAllGather:
    """Starts an all-gather of raw sums [C, S]. `wait` returns all ranks' sums [R, C, S], in rank order."""

    def __init__(self, local_CS: Tensor, shard: VocabShard | None):
        self._local_CS = local_CS.contiguous()
        self._ranks_RCS: Tensor | None = None
        self._work: dist.Work | None = None
        if shard is not None and not shard.is_alone:
            assert shard.group is not None
            self._ranks_RCS = local_CS.new_empty(shard.group.size(), *local_CS.shape)
            self._work = _all_gather(self._ranks_RCS.flatten(0, 1), self._local_CS, group=shard.group, async_op=True)

    def wait(self) -> Tensor:
        if self._ranks_RCS is None:
            return self._local_CS[None]
        assert self._work is not None
        self._work.wait()
        self._work = None
        return self._ranks_RCS


def reduce_hidden_grad(grad_TD: Tensor, shard: VocabShard | None) -> Tensor:
    """All-reduce the hidden states' gradient in place if `shard.reduce_hidden_grad` is True."""
    if shard is not None and not shard.is_alone and shard.reduce_hidden_grad:
        dist.all_reduce(grad_TD, group=shard.group)
    return grad_TD


def rows_of(rows_VX: Tensor, shard: VocabShard | None, student: VocabShard | None, vocabulary: int) -> Tensor:
    """Return the rows of a head's weight or bias that belong to the student's shard and are below `vocabulary`.

    rows_VX: the head's rows on this rank, which are the rows of `shard`, or all rows if `shard` is None. If a rank
    needs rows of other ranks, the ranks exchange rows, and cache them until rows_VX is modified or freed.
    """
    if shard is None or shard.is_alone:
        start, stop = (0, vocabulary) if student is None else student.within(vocabulary)
        return rows_VX[start:stop]
    if student is None or student.is_alone:
        raise ValueError(
            f"a teacher head of rows {shard.start}:{shard.stop} over {len(shard.borders)} ranks, a student head with "
            "all rows: expected the student's head sharded over the same ranks, or an unsharded teacher head"
        )
    assert shard.group is not None
    assert student.group is not None
    teacher_ranks, student_ranks = map(dist.get_process_group_ranks, (shard.group, student.group))
    if teacher_ranks != student_ranks:
        raise ValueError(
            f"a teacher head over ranks {teacher_ranks}, a student head over ranks {student_ranks}: expected the "
            "same process group for both"
        )
    wanted = [(min(start, vocabulary), min(stop, vocabulary)) for start, stop in student.borders]
    if all(_overlap(want, held) == want for held, want in zip(shard.borders, wanted, strict=True)):
        start, stop = student.within(vocabulary)
        return rows_VX[start - shard.start : stop - shard.start] if start < stop else rows_VX[:0]
    # the cache is keyed by tensors: if it were by addresses, a rank that reuses an address could hit it alone
    key = (0 if rows_VX.is_inference() else rows_VX._version, shard.borders, tuple(wanted))
    cached = _EXCHANGED.get(rows_VX)
    if cached is None or cached[0] != key:
        cached = _EXCHANGED[rows_VX] = (key, _resharded(rows_VX, shard, wanted))
    return cached[1]


#: cache of exchanged rows by their source tensor; a freed tensor frees its entry, a changed tensor replaces it
_EXCHANGED = WeakTensorKeyDictionary()


def _resharded(rows_VX: Tensor, shard: VocabShard, wanted: list[Range]) -> Tensor:
    """Exchange rows with the other ranks, and return this rank's rows. wanted: the range that each rank needs."""
    held, want = (shard.start, shard.stop), wanted[dist.get_rank(shard.group)]
    outgoing = [_overlap(held, border) for border in wanted]
    incoming = [_overlap(border, want) for border in shard.borders]
    sent = torch.cat([rows_VX.detach()[start - held[0] : stop - held[0]] for start, stop in outgoing])
    received = sent.new_empty(want[1] - want[0], *rows_VX.shape[1:])
    received_rows, sent_rows = ([stop - start for start, stop in ranges] for ranges in (incoming, outgoing))
    dist.all_to_all_single(received, sent, received_rows, sent_rows, group=shard.group)
    # the received parts are in rank order, which can differ from the order of the vocabulary
    parts = received.split(received_rows)
    return torch.cat([parts[rank] for rank in sorted(range(len(parts)), key=lambda rank: incoming[rank])])


def _overlap(one: Range, other: Range) -> Range:
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


@dataclass(frozen=True)
class TopKLogits:
    """The top K ids of each row, the argmax first.

    gap_CK: the logits of these ids minus the largest logit. largest_C: the largest logit.
    outside_C: the mass of all other ids, in units of the argmax's mass.
    """

    ids_CK: Tensor
    gap_CK: Tensor
    largest_C: Tensor
    outside_C: Tensor

    @property
    def log_mass_C(self) -> Tensor:
        """The log of the mass of all ids, in units of the argmax's mass."""
        return log_sum_exp(torch.ones_like(self.outside_C), self.gap_CK[:, 1:].exp().sum(1) + self.outside_C)

    @property
    def log_probs_CK(self) -> Tensor:
        return self.gap_CK - self.log_mass_C[:, None]

    @property
    def tail_log_prob_C(self) -> Tensor:
        """The log of the mass outside the ids. 1 − Σp would have no correct digit on peaked rows."""
        return self.outside_C.log() - self.log_mass_C


def top_k(logits_CV: Tensor, k: int, shard: VocabShard | None, inside_C1: Tensor | None = None) -> TopKLogits:
    """Return the top K ids and the mass outside them. With several ranks, this needs one all-gather.

    logits_CV: this rank's part of the logits, divided by the temperature. This tensor is overwritten.
    inside_C1: an additional id of each row, whose mass is not counted as mass outside; not supported with shards.
    """
    best_CK, ids_CK = local_top_k(logits_CV, k, shard)
    if logits_CV.shape[1]:
        columns_CK = ids_CK[:, : logits_CV.shape[1]].long() - (0 if shard is None else shard.start)
        logits_CV.scatter_(1, columns_CK, -math.inf)
        if inside_C1 is not None:
            logits_CV.scatter_(1, inside_C1, -math.inf)
        rest_C1 = logits_CV.sub_(best_CK[:, :1]).exp_().sum(1, keepdim=True)
    else:  # a rank without columns has no mass
        rest_C1 = torch.zeros_like(best_CK[:, :1])
    ranks_RCX = AsyncAllGather(torch.cat([best_CK, ids_CK, best_CK[:, :1], rest_C1], 1), shard).wait()
    logits_RCK, ids_RCK, largest_RC1, rest_RC1 = ranks_RCX.split([k, k, 1, 1], 2)
    best_CK, ids_CK, others_CN = merged_top_k(logits_RCK, ids_RCK, k)
    largest_C = best_CK[:, 0]
    outside_C = (others_CN - largest_C[:, None]).exp().sum(1)
    outside_C += (rest_RC1[..., 0] * (largest_RC1[..., 0] - largest_C).exp()).sum(0)
    return TopKLogits(ids_CK, best_CK - best_CK[:, :1], largest_C, outside_C)


def largest(values_CV: Tensor, k: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return the K largest values of each row over all ranks and their ids, in descending order, [C, K] each."""
    ranks_RCX = AsyncAllGather(torch.cat(local_top_k(values_CV, k, shard), 1), shard).wait()
    values_RCK, ids_RCK = ranks_RCX.chunk(2, 2)
    return merged_top_k(values_RCK, ids_RCK, k)[:2]


def local_top_k(values_CV: Tensor, k: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return this rank's K largest values and their ids, in the values' dtype, [C, K] each."""
    values_CK, columns_CK = values_CV.topk(min(k, values_CV.shape[1]), 1)
    missing = (0, k - values_CK.shape[1])
    # ids are exact in float32, because they are far below 2²⁴
    ids_CK = pad(columns_CK + (0 if shard is None else shard.start), missing, value=-1).to(values_CK.dtype)
    return pad(values_CK, missing, value=-math.inf), ids_CK


def merged_top_k(values_RCK: Tensor, ids_RCK: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the K largest of all ranks' candidates, their ids, and the candidates with −∞ in place of these K."""
    values_CN, ids_CN = (ranked_RCK.transpose(0, 1).flatten(1) for ranked_RCK in (values_RCK, ids_RCK))
    values_CK, places_CK = values_CN.topk(k, 1)
    return values_CK, ids_CN.gather(1, places_CK).long(), values_CN.scatter(1, places_CK, -math.inf)
