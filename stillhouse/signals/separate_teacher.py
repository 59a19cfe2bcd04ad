"""A teacher that runs before the student, in its own layout if it has one, and sends hidden states, never logits.

A separate runner has the teacher's layers and final norm. It computes the hidden states of all micro-batches of a
step. Each process of the student's last stage then receives the hidden states of its micro-batches. It also has the
teacher's head, sharded like the student's head, and applies the head to these hidden states (`TeacherHidden`).
The transfers depend only on the micro-batch shapes and the two layouts, so every process computes the same transfers.

B rows, S tokens per row of a micro-batch, E the teacher's width.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.objective import TEACHER, OutputHead, Signals
from stillhouse.parallel import (
    Layout,
    Mesh,
    ModelSource,
    ShardedMicroBatches,
    StageInputs,
    TeacherHead,
    TeacherHidden,
    WaitingWeights,
    build_runner,
    only_layers,
    padded_shapes,
    shard_micro_batches,
)
from stillhouse.proofs.layouts import needs_proof, prove_runner
from stillhouse.signals.signal_source import ReadySignals, SignalSource


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of a micro-batch in both layouts.

    rows, tokens: rows, and tokens per row, before padding
    teacher_BS, student_BS: the padded shapes
    teacher_number: the micro-batch's number among the micro-batches on which the teacher runs
    """

    rows: int
    tokens: int
    teacher_BS: tuple[int, int]
    student_BS: tuple[int, int]
    teacher_number: int = 0


@dataclass(frozen=True)
class Transfer:
    """Rank `sender` sends the columns start:stop of a micro-batch's unsharded sequences to rank `receiver`."""

    micro_batch: int
    sender: int
    receiver: int
    start: int
    stop: int


def shapes_of(
    whole_BS: Sequence[tuple[int, int]],
    chosen: Sequence[int],
    teacher: Mesh,
    student: Mesh,
    *,
    uniform_shapes: bool,
) -> list[MicroBatchShape]:
    """Return the shapes of a step's micro-batches in both layouts.

    chosen: the numbers of the micro-batches on which the teacher runs

    All other micro-batches have `rows` = 0, because the teacher sends nothing for them. This includes the repeated
    micro-batches without targets that the student's layout adds.
    """
    student_shapes = padded_shapes(whole_BS, student.degrees, uniform_shapes=uniform_shapes)
    shapes = [MicroBatchShape(0, 0, (0, 0), student_BS) for student_BS in student_shapes]
    teacher_shapes = padded_shapes([whole_BS[number] for number in chosen], teacher.degrees) if chosen else []
    for teacher_number, (number, teacher_BS) in enumerate(zip(chosen, teacher_shapes, strict=False)):
        shapes[number] = MicroBatchShape(*whole_BS[number], teacher_BS, student_shapes[number], teacher_number)
    return shapes


def route(shapes: Sequence[MicroBatchShape], teacher_DCT: Tensor, student_DCT: Tensor) -> Iterator[Transfer]:
    """Yield all transfers of a step, in the same order on every process.

    teacher_DCT, student_DCT: the ranks of each layout's last stage, by their data, context and tensor coordinates

    Each process of the student's last stage receives each of its columns once, without padding. All tensor ranks of
    the teacher have the same columns, so each of them sends to a part of the student's tensor ranks.
    """
    teacher_data, teacher_context, teacher_tensor = teacher_DCT.shape
    student_data, student_context, student_tensor = student_DCT.shape
    for number, shape in enumerate(shapes):
        teacher_columns = shape.teacher_BS[1] // teacher_context
        student_columns = shape.student_BS[1] // student_context
        for teacher_rank, student_rank in product(range(teacher_context), range(student_context)):
            start = max(teacher_rank * teacher_columns, student_rank * student_columns)
            stop = min((teacher_rank + 1) * teacher_columns, (student_rank + 1) * student_columns, shape.tokens)
            if start >= stop:
                continue
            senders_T = teacher_DCT[shape.teacher_number % teacher_data, teacher_rank]
            for tensor in range(student_tensor):
                receiver = student_DCT[number % student_data, student_rank, tensor]
                yield Transfer(number, int(senders_T[tensor % teacher_tensor]), int(receiver), start, stop)


def local_columns(transfer: Transfer, shape_BS: tuple[int, int], mesh: Mesh) -> slice:
    """Return a transfer's columns relative to the first column of this process. shape_BS: the padded shape"""
    first = mesh.coordinate("context") * (shape_BS[1] // mesh.degrees.context)
    return slice(transfer.start - first, transfer.stop - first)


def empty_part(shape: MicroBatchShape, mesh: Mesh, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [B, S, E] for this process's columns of a micro-batch in the student's layout.

    If the teacher does not run on the micro-batch, the zeros are a single expanded element, to save memory.
    """
    rows, tokens = shape.student_BS
    size = rows, tokens // mesh.degrees.context, width
    zeros = torch.zeros(size if shape.rows else (), dtype=dtype, device=mesh.device)
    return zeros.expand(size)


class SeparateTeacher(SignalSource):
    """The layers of a teacher, with their own layout and mesh.

    source: the teacher's model
    head: the teacher's head; None on processes without the student's last stage
    keep_head: whether the model in `decoders` also has the teacher's output head

    With layout.offload, the weights are in host memory between requests. A single process moves all weights to the
    device for each request; with several processes, FSDP moves them layer by layer.

    The constructor is a collective of all processes. It raises ValueError for a model that does not fit the layout,
    and for a model family that cannot be divided into pipeline stages.
    """

    def __init__(
        self,
        source: ModelSource,
        layout: Layout,
        mesh: Mesh,
        student_layout: Layout,
        student_mesh: Mesh,
        *,
        head: TeacherHead | None,
        keep_head: bool = False,
    ):
        self._head = head
        layers = source if keep_head else replace(source, build=partial(only_layers, source.build))
        self._runner = build_runner(layout, mesh, layers, None)
        decoder = self._runner.decoders[0]  # of the process's first stage, if it has several stages
        self.decoders = {"teacher": decoder}
        self._device, self._width = mesh.device, decoder.width
        self._dtype = next(decoder.parameters()).dtype
        self._weights: WaitingWeights | None = None
        if layout.offload and mesh.ranks.size == 1:
            self._weights = WaitingWeights(decoder, mesh.device)
        if needs_proof(layout, mesh, layers):
            with self._on_device():
                prove_runner(self._runner, layers, None, teacher_in_stages=False)
        self._mesh = mesh
        self._transfer: _HiddenTransfer | None = None
        if student_mesh.ranks.size > 1:
            teacher_DCT = mesh.tokens.mesh[layout.last_rank]
            student_DCT = student_mesh.tokens.mesh[student_layout.last_rank]
            self._transfer = _HiddenTransfer(mesh, student_mesh, teacher_DCT, student_DCT, self._width, self._dtype)

    def request(self, micro_batches: ShardedMicroBatches) -> ReadySignals:
        """Compute the signals of this process's micro-batches at once, because signals of later steps need memory.

        The signals are `TeacherHidden`. Processes without the student's last stage get no signals.
        """
        return self.request_some(micro_batches, range(len(micro_batches.all_ranks)))

    @torch.no_grad()
    def request_some(self, micro_batches: ShardedMicroBatches, numbers: Sequence[int]) -> ReadySignals:
        """As `request`, but the teacher runs only on the micro-batches with these numbers; the others get zeros."""
        transfer, teacher_micro_batches = self._transfer, self._shard(micro_batches, numbers)
        inputs = [StageInputs(batch.as_read_by_teacher, {}, _hidden_states) for batch in teacher_micro_batches]
        with self._on_device():
            hidden = self._runner.forward(inputs) if inputs else []
        # without an output head, no output processor is called; without the last stage, there is nothing to map
        hidden = [
            batch.in_student_rows(values_BSE)
            for batch, values_BSE in zip(teacher_micro_batches, hidden, strict=False)
        ]
        if transfer is not None:
            received = transfer(hidden, numbers, micro_batches)
            return ReadySignals([self._signals(hidden_BSE) for hidden_BSE in received])
        hidden_by_number: dict[int, Tensor] = dict(zip(numbers, hidden, strict=True))
        absent = torch.zeros((), dtype=self._dtype, device=self._device)
        return ReadySignals(
            [
                self._signals(hidden_by_number.get(number, absent.expand(*batch.shape_BS, self._width)))
                for number, batch in enumerate(micro_batches)
            ]
        )

    def _signals(self, hidden_BSE: Tensor | None) -> Signals:
        if hidden_BSE is None:
            return {}
        assert self._head is not None
        return {TEACHER: TeacherHidden(hidden_BSE.flatten(0, 1), self._head)}

    def _on_device(self) -> AbstractContextManager[None]:
        return nullcontext() if self._weights is None else self._weights.on_device()

    def _shard(self, micro_batches: ShardedMicroBatches, chosen: Sequence[int]) -> Sequence[MicroBatch]:
        """The chosen micro-batches, sharded for this process in the teacher's layout."""
        all_micro_batches, has_all = micro_batches.all_ranks, len(chosen) == len(micro_batches.all_ranks)
        if not chosen:
            return ()
        if has_all and self._transfer is None:
            return micro_batches
        part = all_micro_batches if has_all else StepMicroBatches([all_micro_batches[number] for number in chosen])
        return shard_micro_batches(part, self._mesh)


class _HiddenTransfer:
    """Sends the teacher's hidden states to the processes of the student's last stage.

    teacher_DCT, student_DCT: the ranks of each layout's last stage, by their data, context and tensor coordinates
    """

    def __init__(
        self,
        mesh: Mesh,
        student_mesh: Mesh,
        teacher_DCT: Tensor,
        student_DCT: Tensor,
        width: int,
        dtype: torch.dtype,
    ):
        self.mesh, self._student_mesh, self._width, self._dtype = mesh, student_mesh, width, dtype
        self._teacher_DCT, self._student_DCT = teacher_DCT, student_DCT
        # NCCL requires all ranks in the first operation of a group, but only some ranks take part in the transfers
        dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.ranks.group)

    def __call__(
        self, hidden: Sequence[Tensor], chosen: Sequence[int], micro_batches: ShardedMicroBatches
    ) -> list[Tensor | None]:
        """Return the hidden states of this process's micro-batches; None without the student's last stage.

        hidden: the teacher's hidden states that this process has computed
        """
        student_mesh, step = self._student_mesh, micro_batches.all_ranks
        shapes = shapes_of(
            step.shapes_BS, chosen, self.mesh, student_mesh, uniform_shapes=micro_batches.uniform_shapes
        )
        sent = dict(zip(chosen[self.mesh.coordinate("data") :: self.mesh.degrees.data], hidden, strict=False))
        numbers = range(student_mesh.coordinate("data"), len(shapes), student_mesh.degrees.data)
        received: dict[int, Tensor] = {}
        if dist.get_rank() in self._student_DCT:
            received = {
                number: empty_part(shapes[number], student_mesh, self._width, self._dtype) for number in numbers
            }
        self._send_and_receive(sent, received, shapes)
        return [received.get(number) for number in numbers]

    def _send_and_receive(
        self, sent: dict[int, Tensor], received: dict[int, Tensor], shapes: Sequence[MicroBatchShape]
    ) -> None:
        """Send this process's hidden states, and receive those of the other processes into `received`."""
        rank, all_ranks = dist.get_rank(), self.mesh.ranks.group
        operations: list[dist.P2POp] = []
        incoming: list[tuple[Tensor, Tensor]] = []
        for transfer in route(shapes, self._teacher_DCT, self._student_DCT):
            shape = shapes[transfer.micro_batch]
            if rank == transfer.sender:
                columns = local_columns(transfer, shape.teacher_BS, self.mesh)
                sent_BSE = sent[transfer.micro_batch][: shape.rows, columns].to(self._dtype).contiguous()
                if transfer.receiver != rank:
                    operations.append(dist.P2POp(dist.isend, sent_BSE, transfer.receiver, all_ranks))
            if rank == transfer.receiver:
                columns = local_columns(transfer, shape.student_BS, self._student_mesh)
                part = received[transfer.micro_batch][: shape.rows, columns]
                if transfer.sender == rank:
                    part.copy_(sent_BSE)
                else:
                    incoming.append((part, torch.empty(part.shape, dtype=self._dtype, device=self.mesh.device)))
                    operations.append(dist.P2POp(dist.irecv, incoming[-1][1], transfer.sender, all_ranks))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for part, received_BSE in incoming:
            part.copy_(received_BSE)


def _hidden_states(*, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0) -> Tensor:
    return hidden_states
