"""Vocabulary shards: which rows of an output head live on this rank, and the collectives over the ranks.

The only file of the objective that knows torch.distributed. A head of V rows lies over R ranks; rank r holds its rows
`start:stop`, whatever their number. Hidden states, labels and teacher signals are the same on every rank.

Per chunk of C tokens every rank sums what it needs over its own rows; the raw sums travel in one collective, R·C·S
numbers, and every rank puts them together by itself (`Pieces`). In backward there is one sum of the hidden
states' gradient, where `VocabShard.reduce_hidden_grad` says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

Range = tuple[int, int]

# its new name is in torch 2.13, where the old one warns
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True)
class VocabShard:
    """Rows `start:stop` of the whole vocabulary are here; `group` holds the ranks that hold the others.

    Explicit, never re-derived: DTensor's ceil split and a balanced split disagree (10 rows over 4 ranks are
    3, 3, 3, 1 or 3, 3, 2, 2). Keep one object as long as the layout holds: its first use exchanges the borders
    with the other ranks, once.

    `group`: None where no other rank holds rows.

    `reduce_hidden_grad`: sum the gradient of the hidden states over the group here (True), or leave it to the
    layer below, which sums it anyway under sequence parallelism (False).
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
        """(start, stop) of every rank of the group. A collective when it is first asked for."""
        own = torch.tensor([self.start, self.stop])
        everyone = own[None] if self.is_alone else _gathered(own.to(_device(self.group)), self.group)
        borders = tuple((start, stop) for start, stop in everyone.tolist())
        held = sorted(border for border in borders if border[0] < border[1])
        expected_start = 0
        for start, stop in held:
            if start != expected_start:
                raise ValueError(
                    f"vocabulary shards {', '.join(f'{a}:{b}' for a, b in borders)}: expected rows from 0 on that "
                    f"follow one another; row {min(start, expected_start)} is held "
                    + ("by none" if start > expected_start else "twice")
                )
            expected_start = stop
        return borders

    @property
    def rows(self) -> int:
        """Rows of the whole head."""
        return max(stop for _, stop in self.borders)

    @property
    def most_rows(self) -> int:
        """Rows of the rank that has most."""
        return max(stop - start for start, stop in self.borders)

    def within(self, vocabulary: int) -> Range:
        """The rows that are here, of the first `vocabulary` ones."""
        return min(self.start, vocabulary), min(self.stop, vocabulary)


def check_shard(shard: VocabShard, rows: int) -> None:
    """Refuse a shard whose borders do not fit what is held."""
    if shard.stop - shard.start != rows:
        raise ValueError(
            f"VocabShard({shard.start}, {shard.stop}) with {rows} rows: expected {shard.stop - shard.start}"
        )


class Pieces:
    """Raw sums [C, S] on their way to every rank. `wait` gives all ranks' sums [R, C, S], in the order of ranks."""

    def __init__(self, own_CS: Tensor, shard: VocabShard | None):
        self._own_CS = own_CS.contiguous()
        self._everyone_RCS: Tensor | None = None
        self._work: dist.Work | None = None
        if shard is not None and not shard.is_alone:
            assert shard.group is not None
            self._everyone_RCS = own_CS.new_empty(shard.group.size(), *own_CS.shape)
            self._work = _all_gather(self._everyone_RCS.flatten(0, 1), self._own_CS, group=shard.group, async_op=True)

    def wait(self) -> Tensor:
        if self._everyone_RCS is None:
            return self._own_CS[None]
        assert self._work is not None
        self._work.wait()
        self._work = None
        return self._everyone_RCS


def reduce_hidden_grad(grad_TD: Tensor, shard: VocabShard | None) -> Tensor:
    """Each rank's part of the hidden states' gradient to what autograd is to be given, in place."""
    if shard is not None and not shard.is_alone and shard.reduce_hidden_grad:
        dist.all_reduce(grad_TD, group=shard.group)
    return grad_TD


def rows_of(rows_VX: Tensor, shard: VocabShard | None, student: VocabShard | None, vocabulary: int) -> Tensor:
    """A frozen head's weight or bias on the rows that the student's shard has of the first `vocabulary` ones.

    rows_VX: the head's rows as they lie here, all of them (no shard) or those of its own shard. Where the borders of
    the two differ, rows travel: once for a tensor, as long as it lives and is not written to.
    """
    if shard is None or shard.is_alone:
        start, stop = (0, vocabulary) if student is None else student.within(vocabulary)
        return rows_VX[start:stop]
    if student is None or student.is_alone:
        raise ValueError(
            f"a teacher head of rows {shard.start}:{shard.stop} over {len(shard.borders)} ranks, a student head that "
            "is whole here: expected the student's head sharded over the same ranks, or the teacher's gathered"
        )
    if _ranks(shard) != _ranks(student):
        raise ValueError(
            f"a teacher head over ranks {_ranks(shard)}, a student head over ranks {_ranks(student)}: expected the "
            "same process group for both"
        )
    wanted = [(min(start, vocabulary), min(stop, vocabulary)) for start, stop in student.borders]
    if all(_contains(held, want) for held, want in zip(shard.borders, wanted, strict=True)):
        start, stop = student.within(vocabulary)
        return rows_VX[start - shard.start : stop - shard.start] if start < stop else rows_VX[:0]
    return _once(rows_VX, (shard.borders, tuple(wanted)), lambda: _resharded(rows_VX, shard, wanted))


#: rows that have travelled: of a tensor that is gone or has been written to since, nothing is kept
_TRAVELLED = WeakTensorKeyDictionary()


def _once(rows_VX: Tensor, layout: object, make: Callable[[], Tensor]) -> Tensor:
    # by the tensor itself, not its address: every rank then finds or misses it in the same pass
    key = (0 if rows_VX.is_inference() else rows_VX._version, layout)
    kept = _TRAVELLED.get(rows_VX)
    if kept is None or kept[0] != key:
        kept = _TRAVELLED[rows_VX] = (key, make())
    return kept[1]


def _resharded(rows_VX: Tensor, shard: VocabShard, wanted: list[Range]) -> Tensor:
    """Every rank sends each other rank the rows that it wants. `wanted` follow one another, as do the borders."""
    own, want = (shard.start, shard.stop), wanted[dist.get_rank(shard.group)]
    outgoing = [_overlap(own, each) for each in wanted]
    incoming = [_overlap(each, want) for each in shard.borders]
    sent = torch.cat([rows_VX.detach()[start - own[0] : stop - own[0]] for start, stop in outgoing])
    received = sent.new_empty(want[1] - want[0], *rows_VX.shape[1:])
    received_rows, sent_rows = ([stop - start for start, stop in each] for each in (incoming, outgoing))
    dist.all_to_all_single(received, sent, received_rows, sent_rows, group=shard.group)
    # by rank, which need not be the order of the vocabulary
    parts = received.split(received_rows)
    return torch.cat([parts[rank] for rank in sorted(range(len(parts)), key=lambda rank: incoming[rank])])


def _overlap(one: Range, other: Range) -> Range:
    start = min(max(one[0], other[0]), one[1])
    return start, max(start, min(one[1], other[1]))


def _contains(outer: Range, inner: Range) -> bool:
    return inner[0] >= inner[1] or (outer[0] <= inner[0] and inner[1] <= outer[1])


def _gathered(own: Tensor, group: ProcessGroup | None) -> Tensor:
    everyone = own.new_empty(dist.get_world_size(group), *own.shape)
    _all_gather(everyone.flatten(0, 1), own, group=group)
    return everyone


def _ranks(shard: VocabShard) -> list[int]:
    assert shard.group is not None
    return dist.get_process_group_ranks(shard.group)


def _device(group: ProcessGroup | None) -> torch.device:
    """Where the group's collectives find small tensors: on the CPU wherever it can."""
    backend = str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
