"""The order of a pipeline's actions: 1F1B for the student; idle ranks run the teacher for the next step.

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
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

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

    done: for each rank, the number of T actions of the next step that the rank runs in this step.
    time: the duration of the step, in units of a forward of a student's stage.
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
        return [needed for needed in _needs(action, len(ranks)) if needed not in run]

    orders_of_torch = [one_f_one_b(rank, len(ranks), micro_batches) for rank in ranks]
    student = [[Action(0, rank, *action) for action in orders_of_torch[rank]] for rank in ranks]
    teacher_now = [[Action(0, rank, "T", number) for number in range(done[rank], micro_batches)] for rank in ranks]
    teacher_next = [[Action(1, rank, "T", number) for number in range(next_micro_batches)] for rank in ranks]
    without_next = simulate([[student[rank], teacher_now[rank]] for rank in ranks], needs, costs)
    lanes = [[student[rank], teacher_now[rank] + teacher_next[rank]] for rank in ranks]
    with_next = simulate(lanes, needs, costs)
    limit = max(without_next.values())
    kept = [action for action, end in with_next.items() if not action.step or end - teacher <= limit]
    orders = tuple(tuple(action for action in kept if action.stage == rank) for rank in ranks)
    next_done = tuple(sum(action.step for action in order) for order in orders)
    return Order(orders, next_done, max(simulate([[order] for order in orders], needs, costs).values()))


def _needs(action: Action, stages: int) -> list[Action]:
    """Return the actions that have to end before `action` can start."""
    stage, kind = action.stage, action.kind
    if kind == "B":
        behind = [action._replace(stage=stage + 1)] if stage + 1 < stages else []
        return [action._replace(kind="F"), *behind]
    before = [action._replace(stage=stage - 1)] if stage else []
    return [*before, action._replace(kind="T")] if kind == "F" and stage + 1 == stages else before


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Yield kinds and micro-batches in the order in which torch's Schedule1F1B runs them on a rank."""
    first = min(micro_batches, ranks - rank)
    yield from (("F", number) for number in range(first))
    for number in range(micro_batches):
        yield "B", number
        if first + number < micro_batches:
            yield "F", first + number


@dataclass
class _Rank:
    lanes: Sequence[Sequence[Action]]
    at: list[int] = field(default_factory=list)
    doing: tuple[float, Action] | None = None

    def heads(self) -> Iterator[tuple[int, Action]]:
        """Yield the next action of each lane, with the lane's number."""
        return ((n, lane[at]) for n, (lane, at) in enumerate(zip(self.lanes, self.at, strict=True)) if at < len(lane))


def simulate(
    lanes: Sequence[Sequence[Sequence[Action]]],
    needs: Callable[[Action], Sequence[Action]],
    costs: Mapping[str, float],
) -> dict[Action, float]:
    """Return the time at which every action ends, in the order of these times.

    lanes: for each rank, one or more sequences of actions. A free rank runs the next action of its first lane whose
    next action can start. needs: returns the actions that have to end before an action can start.
    """
    ranks = [_Rank(rank_lanes, [0] * len(rank_lanes)) for rank_lanes in lanes]
    ends: dict[Action, float] = {}
    now = 0.0
    while True:
        for rank in ranks:
            if rank.doing is not None and rank.doing[0] <= now:
                ends[rank.doing[1]], rank.doing = rank.doing[0], None
        for rank in ranks:
            if rank.doing is None:
                for lane, action in rank.heads():
                    if all(needed in ends for needed in needs(action)):
                        rank.at[lane] += 1
                        rank.doing = now + costs[action.kind], action
                        break
        under_way = [rank.doing[0] for rank in ranks if rank.doing is not None]
        if not under_way:
            assert not any(list(rank.heads()) for rank in ranks), "the ranks deadlock"
            return ends
        now = min(under_way)
