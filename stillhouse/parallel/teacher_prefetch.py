"""A pipeline whose teacher runs up to one step before its student, in the bubbles (see `bubble_schedule.py`).

The student uses torch's 1F1B and PipelineStage. The teacher's hidden states are sent in separate messages. The last
stage keeps them until the student's forward of the same micro-batch.

B rows, S tokens per row of a micro-batch; E the teacher's width.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import Schedule1F1B

from stillhouse.data import MicroBatch
from stillhouse.parallel.bubble_schedule import Action, bubble_schedule
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.stages import StagePlan


class Schedule1F1BWithPrefetch(Schedule1F1B):
    """torch's 1F1B, with an order that also contains the teacher's actions."""

    order: Sequence[Action] = ()
    run_teacher: Callable[[Action], None]
    backward_group: ProcessGroup

    def follow(
        self, order: Sequence[Action], run_teacher: Callable[[Action], None], backward_group: ProcessGroup
    ) -> None:
        """Set the order of the next step. run_teacher: runs an action of kind T.

        backward_group: the group for gradients. NCCL runs the messages of a group in the order in which each rank
        issues them. With one group for hidden states and gradients, two ranks that issue them in different orders
        would deadlock.
        """
        self.order, self.run_teacher, self.backward_group = order, run_teacher, backward_group

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        positional, named = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(positional[0], named[0])
        stage, sends = self._stage, Sends()
        assert stage.group is not None
        for action in self.order:
            at = action.micro_batch
            if action.kind == "F":
                _wait(_start(stage.get_fwd_recv_ops(at), stage.group))
                output = stage.forward_one_chunk(at, positional[at], named[at], save_forward_output=return_outputs)
                self._maybe_compute_loss(stage, output, target_mbs, at)
                sends.add(_start(stage.get_fwd_send_ops(at), stage.group))
            elif action.kind == "B":
                _wait(_start(stage.get_bwd_recv_ops(at), self.backward_group))
                stage.backward_one_chunk(at, loss=self._maybe_get_loss(stage, at))
                sends.add(_start(stage.get_bwd_send_ops(at), self.backward_group))
            else:
                self.run_teacher(action)
        sends.wait()
        self._update_losses(stage, losses)
        stage.perform_reduce_grad(1)


@dataclass
class _TeacherStep:
    """The teacher's progress on a step's micro-batches.

    done: for each rank, the number of micro-batches that the rank's teacher stage runs before the step begins.
    request: the number of the request for these micro-batches; None: they were not announced.
    received: hidden states that this stage has received but not used yet, by micro-batch.
    hidden: on the last stage, the teacher's hidden states after its final norm, by micro-batch.
    """

    micro_batches: Sequence[MicroBatch]
    done: tuple[int, ...]
    request: int | None = None
    received: dict[int, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)


class TeacherPrefetch:
    """Runs this rank's stage of the teacher, and keeps the results for the next step.

    teacher_forward: runs the stage on a micro-batch and the hidden states of the previous stage, without gradient.
    mesh: its `pipelines` are the groups for the teacher's messages and for the student's gradients.
    """

    def __init__(self, teacher_forward: Callable[..., Tensor], plan: StagePlan, mesh: Mesh):
        self.teacher_forward, self.plan, self.device = teacher_forward, plan, mesh.device
        self.group, self.backward_group = mesh.pipelines
        self.ranks, self.rank = self.group.size(), self.group.rank()
        # NCCL connects two ranks at their first message, and blocks the sender until the receiver receives. In a
        # step, the receiver could then be waiting for another message of this sender, and the ranks would deadlock
        token = torch.zeros(1, device=self.device)
        for group in mesh.pipelines:
            if self.rank:
                dist.recv(token, group=group, group_src=self.rank - 1)
            if self.rank + 1 < self.ranks:
                dist.send(token, group=group, group_dst=self.rank + 1)
        #: the announced micro-batches of later steps by request number, in the order of the steps
        self.announced: dict[int, Sequence[MicroBatch]] = {}
        self._numbers = itertools.count()
        self.now, self.next = self._step((), 0), self._step((), 0)
        self.sends = Sends()

    def announce(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Announce the micro-batches of the step after the last announced step; returns the request's number."""
        number = next(self._numbers)
        self.announced[number] = micro_batches
        return number

    def begin(self, micro_batches: Sequence[MicroBatch], request: int | None, *, runs: bool) -> Sequence[Action]:
        """Return this rank's actions in a step. On the last stage, T actions write hidden states to `now.hidden`.

        request: the number of the step's request; None: the step was not announced. runs: whether the step needs the
            teacher.
        """
        for number in [number for number in self.announced if request is None or number <= request]:
            del self.announced[number]
        next_request, following = next(iter(self.announced.items()), (None, ()))
        if request is not None and self.next.request == request:
            self.now = self.next
        else:
            self.now = self._step(micro_batches, 0 if runs else len(micro_batches))
        self.next = self._step(following, 0, next_request)
        order = bubble_schedule(len(micro_batches), len(following), self.plan.teacher_cost, self.now.done)
        self.next.done = order.done
        return order.ranks[self.rank]

    def run_teacher(self, action: Action) -> None:
        """Run an action of kind T."""
        step = self.next if action.step else self.now
        number = action.micro_batch
        received: tuple[Tensor, ...] = ()
        if self.rank:
            waiting = step.received.pop(number, None)
            received = (self._receive(step.micro_batches[number]) if waiting is None else waiting,)
        hidden_BSE = self.teacher_forward(step.micro_batches[number], *received).contiguous()
        if self.rank + 1 == self.ranks:
            step.hidden[number] = hidden_BSE
            return
        self.sends.send(hidden_BSE, self.group, self.rank + 1)

    def end(self) -> None:
        """Complete all messages of the step: receive the hidden states that the previous stage has already sent for
        the next step.
        """
        if self.rank:
            done = self.next.done
            for number in range(done[self.rank], done[self.rank - 1]):
                self.next.received[number] = self._receive(self.next.micro_batches[number])
        self.sends.wait()

    def forget(self, request: int | None) -> None:
        """Drop the announcement of micro-batches that no training step will run."""
        if request is not None:
            self.announced.pop(request, None)

    def _step(self, micro_batches: Sequence[MicroBatch], done: int, request: int | None = None) -> _TeacherStep:
        """Return a step that has not begun. done: the same number for every rank (see `_TeacherStep`)"""
        return _TeacherStep(micro_batches, (done,) * self.ranks, request)

    def _receive(self, micro_batch: MicroBatch) -> Tensor:
        assert self.plan.teacher is not None
        hidden_BSE = self.plan.teacher.empty(micro_batch.shape_BS, self.device)
        dist.recv(hidden_BSE, group=self.group, group_src=self.rank - 1)
        return hidden_BSE


class _Message(NamedTuple):
    """A message in progress. tensor: the data, which must stay alive until the message is complete."""

    work: Any
    tensor: Tensor


class Sends:
    """The messages that a rank is sending."""

    def __init__(self) -> None:
        self.started: list[_Message] = []

    def send(self, tensor: Tensor, group: ProcessGroup, rank: int) -> None:
        self.add([_Message(dist.isend(tensor, group=group, group_dst=rank), tensor)])

    def add(self, started: Iterable[_Message]) -> None:
        self.started = [message for message in self.started if not message.work.is_completed()]
        self.started += started

    def wait(self) -> None:
        _wait(self.started)
        self.started = []


def _start(operations: Iterable[P2POp], group: ProcessGroup) -> list[_Message]:
    """Start torch's messages in `group` instead of the stage's group. Both groups have the same ranks."""
    started = []
    for operation in operations:
        peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
        started.append(_Message(operation.op(operation.tensor, group=group, **peer), operation.tensor))
    return started


def _wait(started: Iterable[_Message]) -> None:
    for message in started:
        message.work.wait()
