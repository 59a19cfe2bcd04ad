"""A pipeline whose teacher runs up to one step before its student, in the bubbles of 1F1B.

The student uses torch's 1F1B and PipelineStage. The teacher's hidden states are sent in separate messages, and the
last stage keeps them until the student's forward of the same micro-batch.

A simulation with estimated costs gives the order before each step. Every process computes the same order, so the
ranks cannot deadlock, even if the true costs are different.

    F, B    forward and backward of the student
    T       forward of the teacher

A free rank runs the student's next action. If that action cannot start yet, the rank runs the teacher's next action.
All ranks wait for the slowest rank at the end of a step, because gradient clipping needs the global norm. Let t be
the time at which the step would end without T actions of the next step. T actions of the next step that would start
after t are left out. The next step then runs them, before the student's actions or in bubbles.

Example: two ranks, four micro-batches per step, F costs 1, B 2 and T 1 (`bubble_schedule(4, 4, 1.0, (4, 3))`). T0' is
the teacher's forward for the first micro-batch of the next step:

    rank 0  |F0 |F1 |T0'|T1'|B0     |F2 |B1     |F3 |B2     |T2'|B3     |T3'|
    rank 1  |T3 |F0 |B0     |F1 |B1     |F2 |B2     |F3 |B3     |T0'|T1'|T2'|
    time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16

The previous step ran T0 to T3 on rank 0 but only T0 to T2 on rank 1, so rank 1 runs T3 in its first bubble. Without
the T actions of the next step, this step would end at 15. T3' on rank 1 would start at 16, so it is left out again.

B rows, S tokens per row of a micro-batch; E the teacher's width.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import Schedule1F1B

from stillhouse.data import MicroBatch
from stillhouse.parallel.mesh import Mesh
from stillhouse.parallel.stages import StagePlan

#: the costs of a stage of the student, in units of its forward
FORWARD, BACKWARD = 1, 2


class Action(NamedTuple):
    """step: 0 for the current step, 1 for the next step. kind: F, B or T (`simulate` accepts any kind)."""

    step: int
    stage: int
    kind: str
    micro_batch: int


@dataclass(frozen=True)
class Order:
    """The order in which every rank runs its actions in a step.

    done: by rank, the number of T actions of the next step in this order. time: the duration of the step, in units of
    a forward of a student's stage.
    """

    ranks: tuple[tuple[Action, ...], ...]
    done: tuple[int, ...]
    time: float


@cache
def bubble_schedule(micro_batches: int, next_micro_batches: int, teacher: float, done: tuple[int, ...]) -> Order:
    """Return the order of a step. next_micro_batches: the number of micro-batches of the next step (0: unknown).

    teacher: the cost of a T, in units of a forward of a student's stage. done: `Order.done` of the previous step.
    """
    ranks, costs = range(len(done)), {"F": FORWARD, "B": BACKWARD, "T": teacher}
    run = {Action(0, rank, "T", number) for rank in ranks for number in range(done[rank])}

    def needs(action: Action) -> list[Action]:
        """Return the actions that have to end before `action` can start."""
        neighbour = action.stage + (1 if action.kind == "B" else -1)
        needed = [action._replace(stage=neighbour)] if neighbour in ranks else []
        if action.kind == "B":
            needed.append(action._replace(kind="F"))
        elif action.kind == "F" and action.stage == ranks[-1]:
            needed.append(action._replace(kind="T"))
        return [other for other in needed if other not in run]

    lanes = []
    for rank in ranks:
        student = [Action(0, rank, *action) for action in one_f_one_b(rank, len(ranks), micro_batches)]
        lanes.append([student, [Action(0, rank, "T", number) for number in range(done[rank], micro_batches)]])
    limit = max(simulate(lanes, needs, costs).values())
    for rank, (_, teacher_lane) in enumerate(lanes):
        teacher_lane += [Action(1, rank, "T", number) for number in range(next_micro_batches)]
    with_next = simulate(lanes, needs, costs)
    kept = [action for action, end in with_next.items() if not action.step or end - teacher <= limit]
    orders = tuple(tuple(action for action in kept if action.stage == rank) for rank in ranks)
    next_done = tuple(sum(action.step for action in order) for order in orders)
    return Order(orders, next_done, max(simulate([[order] for order in orders], needs, costs).values()))


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield kinds and micro-batches in the order in which torch's Schedule1F1B runs them on a rank."""
    first = min(micro_batches, ranks - rank)
    yield from (("F", number) for number in range(first))
    for number in range(micro_batches):
        yield "B", number
        if first + number < micro_batches:
            yield "F", first + number


def simulate(
    lanes: Sequence[Sequence[Sequence[Action]]],
    needs: Callable[[Action], Sequence[Action]],
    costs: Mapping[str, float],
) -> dict[Action, float]:
    """Return the time at which every action ends, in the order of these times.

    lanes: for each rank, one or more sequences of actions. A free rank runs the next action of its first lane whose
    next action can start. needs: returns the actions that have to end before an action can start.
    """
    waiting = [[deque(lane) for lane in rank_lanes] for rank_lanes in lanes]
    doing: list[tuple[float, Action] | None] = [None] * len(lanes)
    ends: dict[Action, float] = {}
    now = 0.0
    while True:
        for rank, running in enumerate(doing):
            if running is not None and running[0] <= now:
                ends[running[1]], doing[rank] = running[0], None
        for rank, rank_lanes in enumerate(waiting):
            can_start = [lane for lane in rank_lanes if lane and all(needed in ends for needed in needs(lane[0]))]
            if doing[rank] is None and can_start:
                action = can_start[0].popleft()
                doing[rank] = now + costs[action.kind], action
        under_way = [running[0] for running in doing if running is not None]
        if not under_way:
            assert not any(lane for rank_lanes in waiting for lane in rank_lanes), "the ranks deadlock"
            return ends
        now = min(under_way)


class Schedule1F1BWithPrefetch(Schedule1F1B):
    """torch's 1F1B, with an order that also contains the teacher's actions.

    order: of the next step. run_teacher: runs an action of kind T. backward_group: the group for gradients (see
    `Pipeline._message_group`).
    """

    order: Sequence[Action] = ()
    run_teacher: Callable[[Action], None]
    backward_group: ProcessGroup

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

    done: by rank, the number of micro-batches that the rank's teacher stage runs before the step begins.
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

    stage: runs the teacher on the micro-batch `teacher_of` and the hidden states of the previous stage.
    mesh: its `pipelines` are the groups for the teacher's messages and for the student's gradients.
    """

    def __init__(self, stage: Callable[..., Tensor], plan: StagePlan, mesh: Mesh):
        self.stage, self.plan, self.device = stage, plan, mesh.device
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
        self.now = self.next = _TeacherStep((), (0,) * self.ranks)
        self.sends = Sends()

    def announce(self, micro_batches: Sequence[MicroBatch]) -> int:
        """Announce the micro-batches of the step after the last announced step. Returns the request's number."""
        number = next(self._numbers)
        self.announced[number] = micro_batches
        return number

    def begin(self, micro_batches: Sequence[MicroBatch], request: int | None, *, runs: bool) -> Sequence[Action]:
        """Return this rank's actions in a step. On the last stage, T actions write hidden states to `now.hidden`.

        request: of the step; None: it was not announced. runs: whether the step needs the teacher.
        """
        for number in [number for number in self.announced if request is None or number <= request]:
            del self.announced[number]
        next_request, following = next(iter(self.announced.items()), (None, ()))
        if request is not None and self.next.request == request:
            self.now = self.next
        else:
            self.now = _TeacherStep(micro_batches, (0 if runs else len(micro_batches),) * self.ranks)
        order = bubble_schedule(len(micro_batches), len(following), self.plan.teacher_cost, self.now.done)
        self.next = _TeacherStep(following, order.done, next_request)
        return order.ranks[self.rank]

    def run_teacher(self, action: Action) -> None:
        """Run an action of kind T."""
        step, number = self.next if action.step else self.now, action.micro_batch
        received: tuple[Tensor, ...] = ()
        if self.rank:
            waiting = step.received.pop(number, None)
            received = (self._receive(step.micro_batches[number]) if waiting is None else waiting,)
        hidden_BSE = self.stage(*received, teacher_of=step.micro_batches[number]).contiguous()
        if self.rank + 1 < self.ranks:
            self.sends.send(hidden_BSE, self.group, self.rank + 1)
        else:
            step.hidden[number] = hidden_BSE

    def end(self) -> None:
        """Receive the hidden states that the previous stage has sent for the next step, and complete all messages."""
        if self.rank:
            done = self.next.done
            for number in range(done[self.rank], done[self.rank - 1]):
                self.next.received[number] = self._receive(self.next.micro_batches[number])
        self.sends.wait()

    def _receive(self, micro_batch: MicroBatch) -> Tensor:
        assert self.plan.teacher is not None
        hidden_BSE = self.plan.teacher.empty(micro_batch.shape_BS, self.device)
        dist.recv(hidden_BSE, group=self.group, group_src=self.rank - 1)
        return hidden_BSE


#: a message in progress, and its tensor, which must stay alive until the message is complete
_Message = tuple[Any, Tensor]


class Sends(list[_Message]):
    """The messages that a rank is sending."""

    def send(self, tensor: Tensor, group: ProcessGroup, rank: int) -> None:
        self.add([(dist.isend(tensor, group=group, group_dst=rank), tensor)])

    def add(self, started: Iterable[_Message]) -> None:
        self[:] = [*(message for message in self if not message[0].is_completed()), *started]

    def wait(self) -> None:
        _wait(self)
        self.clear()


def _start(operations: Iterable[P2POp], group: ProcessGroup) -> list[_Message]:
    """Start torch's messages in `group` instead of the stage's group. Both groups have the same ranks."""
    started = []
    for operation in operations:
        peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
        started.append((operation.op(operation.tensor, group=group, **peer), operation.tensor))
    return started


def _wait(started: Iterable[_Message]) -> None:
    for work, _ in started:
        work.wait()
