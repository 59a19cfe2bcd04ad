"""The order of a pipeline's actions: 1F1B of the student, and the next step's teacher where a rank would wait.

The order is fixed before a step, by simulation on given costs: every process finds the same one by itself, and
nobody waits in a circle whatever the true costs are.

    F, B    of the student, forward and backward
    T       of the teacher, forward

A rank that is free takes the student's next action; if that cannot start yet, the teacher's. Of the next step nothing
is begun when the student would be at its end without it: the gradients are clipped by the norm of all, so that all
ranks wait for the last one. What is left of the teacher then runs in that step, before its student or in its gaps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

#: of the student, in its own forwards
FORWARD, BACKWARD = 1, 2


class Action(NamedTuple):
    """step: of an order, 0 for its own and 1 for the next one. Further kinds are the caller's."""

    step: int
    stage: int
    kind: str
    micro_batch: int


@dataclass(frozen=True)
class Order:
    """What every rank does in a step, one after the other. time: that takes, in forwards of the student's stage.

    done: micro-batches of the next step that each rank's stage of the teacher has run at the end.
    """

    ranks: tuple[tuple[Action, ...], ...]
    done: tuple[int, ...]
    time: float


@cache
def fill(micro_batches: int, upcoming: int, teacher: float, done: tuple[int, ...]) -> Order:
    """The order of a step of so many micro-batches before a step of `upcoming` (0: none is known).

    teacher: its cost in the student's forwards. done: `Order.done` of the step before, one for each rank.
    """
    ranks, costs = range(len(done)), {"F": FORWARD, "B": BACKWARD, "T": teacher}
    run = {Action(0, rank, "T", number) for rank in ranks for number in range(done[rank])}

    def needs(action: Action) -> list[Action]:
        return [each for each in _needs(action, len(ranks)) if each not in run]

    student = [[Action(0, rank, *each) for each in one_f_one_b(rank, len(ranks), micro_batches)] for rank in ranks]
    own = [[Action(0, rank, "T", number) for number in range(done[rank], micro_batches)] for rank in ranks]
    further = [[Action(1, rank, "T", number) for number in range(upcoming)] for rank in ranks]
    unfilled = simulate([[student[rank], own[rank]] for rank in ranks], needs, costs)
    filled = simulate([[student[rank], own[rank] + further[rank]] for rank in ranks], needs, costs)
    limit = max(unfilled.values())
    kept = [action for action, end in filled.items() if not action.step or end - teacher <= limit]
    orders = tuple(tuple(action for action in kept if action.stage == rank) for rank in ranks)
    ahead = tuple(sum(action.step for action in each) for each in orders)
    return Order(orders, ahead, max(simulate([[each] for each in orders], needs, costs).values()))


def _needs(action: Action, stages: int) -> list[Action]:
    """What has to be done before an action can start."""
    stage, kind = action.stage, action.kind
    if kind == "B":
        behind = [action._replace(stage=stage + 1)] if stage + 1 < stages else []
        return [action._replace(kind="F"), *behind]
    before = [action._replace(stage=stage - 1)] if stage else []
    return [*before, action._replace(kind="T")] if kind == "F" and stage + 1 == stages else before


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """Kinds and micro-batches, as torch's Schedule1F1B runs them on a rank."""
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
        """Of each lane its next action."""
        return ((n, lane[at]) for n, (lane, at) in enumerate(zip(self.lanes, self.at, strict=True)) if at < len(lane))


def simulate(
    lanes: Sequence[Sequence[Sequence[Action]]],
    needs: Callable[[Action], Sequence[Action]],
    costs: Mapping[str, float],
) -> dict[Action, float]:
    """When every action ends, in the order of ends.

    lanes: of each rank, actions each in their order; a rank that is free takes the first lane whose next action can
    start. needs: what has to be done before an action. costs: of each kind.
    """
    ranks = [_Rank(each, [0] * len(each)) for each in lanes]
    ends: dict[Action, float] = {}
    now = 0.0
    while True:
        for rank in ranks:
            if rank.doing is not None and rank.doing[0] <= now:
                ends[rank.doing[1]], rank.doing = rank.doing[0], None
        for rank in ranks:
            if rank.doing is None:
                for lane, action in rank.heads():
                    if all(each in ends for each in needs(action)):
                        rank.at[lane] += 1
                        rank.doing = now + costs[action.kind], action
                        break
        under_way = [rank.doing[0] for rank in ranks if rank.doing is not None]
        if not under_way:
            assert not any(list(rank.heads()) for rank in ranks), "the ranks wait for each other"
            return ends
        now = min(under_way)
