"""The idle share of a pipeline, from the order of actions that torch's own schedules give, on unit costs.

    python -m benchmarks.pipeline_idle

On every stage the student's forward costs 1, its backward 2 (1 for the input's gradient and 1 for the weights'
gradients), and the teacher's forward r. Sending costs nothing. A rank runs its actions in the schedule's order. An
action starts as soon as the rank is free and the action's inputs exist. The student of a step waits until all ranks
have ended the previous step, because the gradient is clipped by its global norm. A teacher waits only for its
previous stage.

The teacher's forward is at one of these places:
    in_stage  in the student's forward (what Stillhouse does)
    first     all of a step's micro-batches before its student
    filled    the next step's teacher in this step's idle slots: an idle rank takes the next action of the teacher

p ranks, m micro-batches.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from stillhouse.parallel import SCHEMES

#: simulated steps, and the first step that counts: from there on all steps take the same time
STEPS, STEADY = 12, 3
#: the cost r of a teacher that fills idle slots
TEACHER_TO_FILL = 4
BACKWARD = {"B": 2, "I": 1, "W": 1}
#: our names of torch's schedules
SCHEDULES = list(SCHEMES)


class Move(NamedTuple):
    """An action of a schedule; it is the same in every step."""

    stage: int
    kind: str
    micro_batch: int


class Action(NamedTuple):
    """An action of one of the simulated steps. kind: that of torch's schedule, or T for a forward of the teacher."""

    step: int
    stage: int
    kind: str
    micro_batch: int


def trace(schedule: str, ranks: int, micro_batches: int) -> list[list[Move]]:
    """Every rank's actions, in the order in which torch's schedule runs them."""
    scheme = SCHEMES[schedule]
    stages = [
        SimpleNamespace(
            group_rank=0,
            group_size=ranks,
            num_stages=ranks * scheme.per_rank,
            stage_index=number,
            submod=nn.Identity(),
            is_first=number == 0,
            is_last=number == ranks * scheme.per_rank - 1,
        )
        for number in scheme.stages_of(0, ranks)
    ]
    made = scheme.schedule(stages if scheme.per_rank > 1 else stages[0], micro_batches, loss_fn=nn.Identity())
    return [_moves(made.pipeline_order[rank]) for rank in range(ranks)]


def _moves(actions: Sequence[Any]) -> list[Move]:
    moves = [
        Move(action.stage_index, action.computation_type.value, action.microbatch_index)
        for action in actions
        if action is not None and action.is_compute_op
    ]
    # torch 2.13 numbers the forwards of 1F1B's last rank from 1
    least = min(move.micro_batch for move in moves if move.kind == "F")
    return [move._replace(micro_batch=move.micro_batch - least * (move.kind == "F")) for move in moves]


def in_flight(moves: Sequence[Move]) -> float:
    """Return the most micro-batches whose activations a rank keeps; with two stages per rank, each counts half."""
    stages = len({move.stage for move in moves})
    kept = itertools.accumulate({"F": 1, "I": 0}.get(move.kind, -1) for move in moves)
    return max(kept) / stages


# simulation


def measure(schedule: str, ranks: int, micro_batches: int, teacher: int) -> dict[str, Any]:
    """Return one row: the idle share for each place of the teacher."""
    moves = trace(schedule, ranks, micro_batches)
    work = micro_batches * SCHEMES[schedule].per_rank * (3 + teacher)
    uniform = Fraction(ranks - 1, micro_batches + ranks - 1)
    times = {
        place: step_time(place, schedule, moves, teacher)
        for place in (("in_stage", "first", "filled") if teacher == TEACHER_TO_FILL else ("in_stage",))
    }
    return {
        "schedule": schedule,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "teacher_cost": teacher,
        "idle": {place: round(1 - work / time, 4) for place, time in times.items()},
        "formula": round(float(uniform), 4) if schedule in ("gpipe", "1f1b") else None,
        "gain": {
            place: round(1 - time / times["in_stage"], 4) for place, time in times.items() if place != "in_stage"
        },
        "in_flight": in_flight(moves[0]),
    }


def step_time(place: str, schedule: str, moves: list[list[Move]], teacher: int) -> float:
    """Return the time of one of many steps; the unit is one stage's student forward."""
    lanes = [_lanes(place, move) for move in moves]
    stages = len(moves) * SCHEMES[schedule].per_rank
    needs = _needs(place, stages, [[Action(0, *move) for move in of_stage] for of_stage in moves])
    costs = {"F": 1 + (teacher if place == "in_stage" else 0), "T": teacher} | BACKWARD
    ends = simulate(lanes, needs, costs)
    last = [0.0] * STEPS
    for action, end in ends.items():
        if action.kind != "T":
            last[action.step] = max(last[action.step], end)
    # the last step is shorter, because it runs no teacher for a next step
    return (last[-2] - last[STEADY]) / (STEPS - 2 - STEADY)


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


def _lanes(place: str, moves: Sequence[Move]) -> list[list[Action]]:
    student = [[Action(step, *move) for move in moves] for step in range(STEPS)]
    teacher = [
        [Action(step, move.stage, "T", move.micro_batch) for move in moves if move.kind == "F"]
        for step in range(STEPS)
    ]
    if place == "in_stage":
        return [list(itertools.chain(*student))]
    if place == "first":
        return [list(itertools.chain(*(action for pair in zip(teacher, student, strict=True) for action in pair)))]
    return [list(itertools.chain(*student)), list(itertools.chain(*teacher))]


def _needs(place: str, stages: int, moves: list[list[Action]]) -> Callable[[Action], list[Action]]:
    """Return a function that gives the actions that must end before an action can start."""
    in_parts = {(move.stage, move.micro_batch) for move in itertools.chain(*moves) if move.kind == "I"}
    ends_of_step = [move[-1] for move in moves]

    def gradient(step: int, stage: int, micro_batch: int) -> Action:
        return Action(step, stage, "I" if (stage, micro_batch) in in_parts else "B", micro_batch)

    def needs(action: Action) -> list[Action]:
        step, stage, kind, micro_batch = action
        if kind == "W":
            return [action._replace(kind="I")]
        if kind in "BI":
            forward = action._replace(kind="F")
            return [forward] if stage + 1 == stages else [forward, gradient(step, stage + 1, micro_batch)]
        before = [action._replace(stage=stage - 1)] if stage else []
        if kind == "T":
            # at most one step ahead: there is memory for the hidden states of two steps
            return before + [action._replace(step=step - 2) for action in ends_of_step if step > 1]
        if place != "in_stage" and stage + 1 == stages:
            before.append(action._replace(kind="T"))
        return before + [action._replace(step=step - 1) for action in ends_of_step if step]

    return needs


def main() -> None:
    for row in rows((2, 4, 8), (1, 2, 4), (0, 1, 4)):
        print(line(row))


def rows(ranks: Sequence[int], rounds: Sequence[int], teachers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """rounds: the number of micro-batches, as multiples of the ranks."""
    for schedule, p, factor, teacher in itertools.product(SCHEDULES, ranks, rounds, teachers):
        yield measure(schedule, p, factor * p, teacher)


def line(row: dict[str, Any]) -> str:
    idle = "  ".join(f"{place} {share:5.1%}" for place, share in row["idle"].items())
    gain = "  ".join(f"{place} {share:5.1%}" for place, share in row["gain"].items())
    formula = "" if row["formula"] is None else f"(p-1)/(m+p-1) {row['formula']:5.1%}"
    return (
        f"{row['schedule']:<12}p {row['ranks']}  m {row['micro_batches']:<3} r {row['teacher_cost']}  "
        f"idle: {idle:<60}{formula:<22}" + (f"gain: {gain}" if gain else "")
    )


if __name__ == "__main__":
    main()
