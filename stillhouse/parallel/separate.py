"""A teacher in a layout of its own, over the same processes: its hidden states travel, never its logits.

The teacher's layers are laid out by themselves and give their last hidden states for a whole step's micro-batches.
Each process then has those of its own micro-batches sent to it, and the student's last stage has the teacher's last
norm and head, laid out as the student's: there the twin goes on as if the teacher's layers were its own.

B rows, S tokens per row of a micro-batch, E the teacher's width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.models import Decoder, processors
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.stages import keep_layers, require_cuttable
from stillhouse.parallel.twin import Tokens, Work


@dataclass(frozen=True)
class Extent:
    """Of a whole micro-batch: rows and tokens per row, and to what the teacher's and the student's ranks pad them."""

    rows: int
    tokens: int
    teacher_BS: tuple[int, int]
    student_BS: tuple[int, int]


@dataclass(frozen=True)
class _Transfer:
    """Columns start:stop of a micro-batch, from one process to another; numbers count over the whole sequence."""

    number: int
    source: int
    target: int
    start: int
    stop: int


def only_layers(make: Callable[[], Decoder]) -> Callable[[], Decoder]:
    """A teacher without its last norm and head, frozen. Raises ValueError for a family that cannot be cut."""

    def body() -> Decoder:
        decoder = _cuttable(make())
        keep_layers(decoder, range(len(decoder.layers())), first=True, last=False)
        return decoder.requires_grad_(False).eval()

    return body


def only_head(make: Callable[[], Decoder]) -> Callable[[], Decoder]:
    """A teacher's last norm and head alone."""

    def head() -> Decoder:
        decoder = _cuttable(make())
        keep_layers(decoder, range(0), first=False, last=True)
        return decoder

    return head


class SeparateTeacher:
    """The layers of a teacher and where their hidden states go.

    teacher: its part here, or one of them. forward: of its runner. last_stage: of teacher and student, the place of
    the last stage along the pipeline's axis.
    """

    def __init__(
        self,
        teacher: Decoder,
        forward: Callable[[Sequence[Work]], list[Tensor]],
        mesh: Mesh,
        student: Mesh,
        last_stage: tuple[int, int],
    ):
        self.teacher, self.forward, self.mesh, self.student = teacher, forward, mesh, student
        self.last_stage = last_stage
        # the first collective of a group has to be one of all its processes (NCCL)
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.everyone)
        self.width, self.dtype = teacher.config.get_text_config().hidden_size, next(teacher.parameters()).dtype

    @torch.no_grad()
    def hear(self, own: Sequence[Tokens], extents: Sequence[Extent]) -> list[Tensor | None]:
        """The teacher's hidden states [B, S, E] of this process's micro-batches, as the student's layout has them;
        None for each where the student has no head. A collective of all processes.

        own: this process's part of the teacher's micro-batches. extents: of all micro-batches of the step; one whose
        rows are 0 is made up for a process that would have none, and is not sent.
        """
        spoken = self.forward([_listening(each) for each in own])
        here, there = _Place(self.mesh, self.last_stage[0]), _Place(self.student, self.last_stage[1])
        made: dict[int, Tensor] = {}
        if there.is_last:
            for number in there.numbers(len(extents)):
                rows, tokens = extents[number].student_BS
                shape = (rows, tokens // self.student.degrees.context, self.width)
                made[number] = torch.zeros(shape, dtype=self.dtype, device=self.mesh.device)
        sent = dict(zip(here.numbers(len(extents)), spoken, strict=False)) if here.is_last else {}
        self._exchange(sent, made, extents)
        return [made.get(number) for number in there.numbers(len(extents))]

    def _exchange(self, sent: dict[int, Tensor], made: dict[int, Tensor], extents: Sequence[Extent]) -> None:
        rank = dist.get_rank()
        operations: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        for each in self._transfers(extents):
            if rank not in (each.source, each.target):
                continue
            extent = extents[each.number]
            if rank == each.source:
                first = self.mesh.place("context") * (extent.teacher_BS[1] // self.mesh.degrees.context)
                piece = sent[each.number][: extent.rows, each.start - first : each.stop - first].contiguous()
            if rank == each.target:
                first = self.student.place("context") * (extent.student_BS[1] // self.student.degrees.context)
                place = made[each.number][: extent.rows, each.start - first : each.stop - first]
            if each.source == each.target:
                place.copy_(piece)
            elif rank == each.source:
                operations.append(dist.P2POp(dist.isend, piece, each.target, self.mesh.everyone))
            else:
                arriving.append((place, torch.empty(place.shape, dtype=self.dtype, device=self.mesh.device)))
                operations.append(dist.P2POp(dist.irecv, arriving[-1][1], each.source, self.mesh.everyone))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for place, arrived in arriving:
            place.copy_(arrived)

    def _transfers(self, extents: Sequence[Extent]) -> Iterator[_Transfer]:
        """In the same order on every process. Ranks with the same tokens take turns in sending."""
        teacher, student = self.mesh.degrees, self.student.degrees
        sources, targets = (
            mesh.tokens.mesh[last] for mesh, last in zip((self.mesh, self.student), self.last_stage, strict=True)
        )
        for number, extent in enumerate(extents):
            parts = extent.teacher_BS[1] // teacher.context, extent.student_BS[1] // student.context
            for ours in range(teacher.context):
                for theirs in range(student.context):
                    start = max(ours * parts[0], theirs * parts[1])
                    stop = min((ours + 1) * parts[0], (theirs + 1) * parts[1], extent.tokens)
                    if start >= stop or not extent.rows:
                        continue
                    for tensor in range(student.tensor):
                        source = int(sources[number % teacher.data, ours, tensor % teacher.tensor])
                        target = int(targets[number % student.data, theirs, tensor])
                        yield _Transfer(number, source, target, start, stop)


@dataclass(frozen=True)
class _Place:
    """This process's in a layout."""

    mesh: Mesh
    last_stage: int

    @property
    def is_last(self) -> bool:
        return self.mesh.place("pipeline") == self.last_stage

    def numbers(self, count: int) -> range:
        """Its micro-batches, of so many."""
        return range(self.mesh.place("data"), count, self.mesh.degrees.data)


def _cuttable(decoder: Decoder) -> Decoder:
    require_cuttable(decoder.config)
    return decoder


def _listening(tokens: Tokens) -> Work:
    return Work(tokens, processors.hidden_states, lambda _: None, asks_teacher=False, precision=nullcontext)
