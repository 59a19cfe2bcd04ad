"""A teacher that runs before the student, in its own layout if it has one, and sends hidden states, never logits.

A separate runner has the teacher's layers and final norm. It computes the hidden states of all micro-batches of a
step. Each process of the student's last stage then receives the hidden states of its micro-batches. The process
also has the teacher's head, sharded like the student's head, and applies it to these hidden states (`TeacherHidden`).
The transfers depend only on the micro-batch shapes and the two layouts, so every process computes the same transfers.

B rows, S tokens per row of a micro-batch, E the teacher's width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from stillhouse.data import MicroBatch, StepMicroBatches
from stillhouse.models.processors import hidden_states
from stillhouse.objective import TEACHER, Signals
from stillhouse.parallel import (
    Layout,
    Mesh,
    ModelSource,
    ShardedMicroBatches,
    StageInputs,
    TeacherHead,
    TeacherHidden,
    build_runner,
    only_layers,
    padded_shapes,
    shard_micro_batches,
)
from stillhouse.parallel.host_memory import WaitingWeights
from stillhouse.proofs.layouts import needs_proof, prove_runner
from stillhouse.signals.signal_source import PendingSignals, SignalSource


@dataclass(frozen=True)
class MicroBatchShape:
    """The shape of a micro-batch in the teacher's layout and in the student's layout.

    rows, tokens: the numbers of rows and of tokens per row before padding. teacher_BS, student_BS: the padded shapes
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


def route(shapes: Sequence[MicroBatchShape], teacher_DCT: Tensor, student_DCT: Tensor) -> Iterator[Transfer]:
    """Yield all transfers of a step, in the same order on every process.

    Each process of the student's last stage receives each of its columns once, without padding. All tensor ranks of
    the teacher have the same columns, so each of them sends to a part of the student's tensor ranks.

    teacher_DCT, student_DCT: the ranks of each layout's last stage, by their data, context and tensor coordinates
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


class SeparateTeacher(SignalSource):
    """The layers of a teacher, with their own layout and mesh.

    head: the teacher's head, or None on processes without the student's last stage
    keep_head: whether the model in `decoders` also has the teacher's output head

    With layout.offload, the weights are in host memory between requests. A single process moves all weights to the
    device for each request; with several processes, FSDP moves them layer by layer.

    The constructor is a collective. It raises ValueError for a model that does not fit the layout.
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
        self._head, self._mesh, self._student_mesh = head, mesh, student_mesh
        layers = source if keep_head else replace(source, build=partial(only_layers, source.build))
        self._runner = build_runner(layout, mesh, layers, None)
        decoder = self._runner.decoders[0]  # the process's first stage, if it has several stages
        self.decoders = {"teacher": decoder}
        self._width, self._dtype = decoder.width, next(decoder.parameters()).dtype
        self._on_device: Callable[[], AbstractContextManager[None]] = nullcontext
        if layout.offload and mesh.ranks.size == 1:
            self._on_device = WaitingWeights(decoder, mesh.device).on_device
        if needs_proof(layout, mesh, layers):
            with self._on_device():
                prove_runner(self._runner, layers, None, teacher_in_stages=False)
        #: the ranks of the last stages of the teacher and of the student, as in `route`; None in a single process
        self._last_ranks: tuple[Tensor, Tensor] | None = None
        if student_mesh.ranks.size > 1:
            student_DCT = student_mesh.tokens.mesh[student_layout.last_rank]
            self._last_ranks = mesh.tokens.mesh[layout.last_rank], student_DCT
            # NCCL requires all ranks in the first operation of a group, but only some take part in the transfers
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=mesh.ranks.group)

    def request(self, micro_batches: ShardedMicroBatches) -> PendingSignals:
        """Compute `TeacherHidden` for the student's last stage. Computing it steps ahead would only need memory."""
        return self.request_some(micro_batches, range(len(micro_batches.all_ranks)))

    @torch.no_grad()
    def request_some(self, micro_batches: ShardedMicroBatches, numbers: Sequence[int]) -> PendingSignals:
        """Like `request`, but the teacher runs only on micro-batches with these numbers; all others get zeros."""
        step = micro_batches.all_ranks
        has_all = len(numbers) == len(step)
        teacher_micro_batches: Sequence[MicroBatch] = micro_batches if numbers else ()
        if numbers and not (has_all and self._last_ranks is None):
            part = step if has_all else StepMicroBatches([step[number] for number in numbers])
            teacher_micro_batches = shard_micro_batches(part, self._mesh)
        inputs = [StageInputs(batch.as_read_by_teacher, {}, hidden_states) for batch in teacher_micro_batches]
        with self._on_device():
            hidden = self._runner.forward(inputs) if inputs else []
        # a process without the teacher's last stage has no hidden states
        hidden = [
            batch.in_student_rows(values_BSE)
            for batch, values_BSE in zip(teacher_micro_batches, hidden, strict=False)
        ]
        received: list[Tensor | None]
        if self._last_ranks is not None:
            received = self._transferred(hidden, numbers, micro_batches, *self._last_ranks)
        else:
            computed = dict(zip(numbers, hidden, strict=True))
            absent = torch.zeros((), dtype=self._dtype, device=self._mesh.device)
            received = [
                computed.get(number, absent.expand(*batch.shape_BS, self._width))
                for number, batch in enumerate(micro_batches)
            ]
        signals: list[Signals] = [{}] * len(received)
        for number, hidden_BSE in enumerate(received):
            if hidden_BSE is not None:
                assert self._head is not None
                signals[number] = {TEACHER: TeacherHidden(hidden_BSE.flatten(0, 1), self._head)}
        return PendingSignals.ready(signals)

    def _transferred(
        self,
        hidden: Sequence[Tensor],
        chosen: Sequence[int],
        micro_batches: ShardedMicroBatches,
        teacher_DCT: Tensor,
        student_DCT: Tensor,
    ) -> list[Tensor | None]:
        """Return the hidden states of this process's micro-batches, or None without the student's last stage.

        hidden: the hidden states that this process has computed
        chosen: the numbers of the micro-batches on which the teacher runs. The teacher sends nothing for the others
            (`rows` = 0), such as the repeated micro-batches that the student's layout adds.
        """
        mesh, student_mesh, step, rank = self._mesh, self._student_mesh, micro_batches.all_ranks, dist.get_rank()
        padded_BS = padded_shapes(step.shapes_BS, student_mesh.degrees, uniform_shapes=micro_batches.uniform_shapes)
        shapes = [MicroBatchShape(0, 0, (0, 0), shape_BS) for shape_BS in padded_BS]
        teacher_BS = padded_shapes([step.shapes_BS[number] for number in chosen], mesh.degrees) if chosen else []
        for at, (number, shape_BS) in enumerate(zip(chosen, teacher_BS, strict=False)):
            shapes[number] = MicroBatchShape(*step.shapes_BS[number], shape_BS, padded_BS[number], at)
        sent = dict(zip(chosen[mesh.coordinate("data") :: mesh.degrees.data], hidden, strict=False))
        numbers = range(student_mesh.coordinate("data"), len(shapes), student_mesh.degrees.data)
        received: dict[int, Tensor] = {}
        for number in numbers if rank in student_DCT else ():
            rows, tokens = padded_BS[number]
            size = rows, tokens // student_mesh.degrees.context, self._width
            # if the teacher did not run on this micro-batch, the zeros are one expanded element, to save memory
            zeros = torch.zeros(size if shapes[number].rows else (), dtype=self._dtype, device=mesh.device)
            received[number] = zeros.expand(size)

        def local_columns(transfer: Transfer, shape_BS: tuple[int, int], mesh: Mesh) -> slice:
            first = mesh.coordinate("context") * (shape_BS[1] // mesh.degrees.context)
            return slice(transfer.start - first, transfer.stop - first)

        operations: list[dist.P2POp] = []
        incoming: list[tuple[Tensor, Tensor]] = []
        for transfer in route(shapes, teacher_DCT, student_DCT):
            shape = shapes[transfer.micro_batch]
            if rank == transfer.sender:
                columns = local_columns(transfer, shape.teacher_BS, mesh)
                sent_BSE = sent[transfer.micro_batch][: shape.rows, columns].to(self._dtype).contiguous()
                if transfer.receiver != rank:
                    operations.append(dist.P2POp(dist.isend, sent_BSE, transfer.receiver, mesh.ranks.group))
            if rank == transfer.receiver:
                columns = local_columns(transfer, shape.student_BS, student_mesh)
                part = received[transfer.micro_batch][: shape.rows, columns]
                if transfer.sender == rank:
                    part.copy_(sent_BSE)
                else:
                    incoming.append((part, torch.empty(part.shape, dtype=self._dtype, device=mesh.device)))
                    operations.append(dist.P2POp(dist.irecv, incoming[-1][1], transfer.sender, mesh.ranks.group))
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        for part, received_BSE in incoming:
            part.copy_(received_BSE)
        return [received.get(number) for number in numbers]
