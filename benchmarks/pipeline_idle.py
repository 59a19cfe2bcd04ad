"""The idle share of a pipeline, from the order of actions that torch's own schedules give, on unit costs.

    python -m benchmarks.pipeline_idle

A stage's student forward costs 1, its backward 2 (of the input 1, of the weights 1), its teacher's forward r; sending
costs nothing, all stages are alike. A rank runs its actions in the schedule's order, each as soon as it is free and
what it needs is there. Steps follow one another: a step's student waits for the end of the step before on all ranks,
since the gradient is clipped by its global norm; a teacher waits for nothing but the stage before it.

Places for the teacher:
    twin      in the student's forward (what Stillhouse does)
    first     all of a step's micro-batches before its student
    filled    the next step's, in this step's idle slots: a rank with nothing else to do takes the next one, and the
              student of the next step does not wait for a teacher that is still at work
    ahead     the same as Stillhouse does it under `1f1b_ahead`: in the order of
              stillhouse/parallel/bubble_schedule.py, with all ranks at their end before a step's gradient is clipped

p ranks, m micro-batches.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from stillhouse.parallel import SCHEMES
from stillhouse.parallel.bubble_schedule import Action, bubble_schedule, simulate

#: steps that are simulated, and the first that counts: from there on each takes as long as the next
STEPS, STEADY = 12, 3
#: in student's forwards: what idle slots are filled with
TEACHER_TO_FILL = 4
BACKWARD = {"B": 2, "I": 1, "W": 1}
#: under the names of torch's
SCHEDULES = [name for name, scheme in SCHEMES.items() if not scheme.prefetch]


class Move(NamedTuple):
    """An action as a schedule has it, in every step the same."""

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
        Move(each.stage_index, each.computation_type.value, each.microbatch_index)
        for each in actions
        if each is not None and each.is_compute_op
    ]
    # torch 2.13 numbers the forwards of 1F1B's last rank from 1
    least = min(each.micro_batch for each in moves if each.kind == "F")
    return [each._replace(micro_batch=each.micro_batch - least * (each.kind == "F")) for each in moves]


def in_flight(moves: Sequence[Move]) -> float:
    """The most micro-batches of which a rank keeps activations at a time, those of one of two stages counted half."""
    stages = len({each.stage for each in moves})
    kept = itertools.accumulate({"F": 1, "I": 0}.get(each.kind, -1) for each in moves)
    return max(kept) / stages


# simulation


def measure(schedule: str, ranks: int, micro_batches: int, teacher: int) -> dict[str, Any]:
    """One row: idle shares and step times of the places."""
    moves = trace(schedule, ranks, micro_batches)
    work = micro_batches * SCHEMES[schedule].per_rank * (3 + teacher)
    uniform = Fraction(ranks - 1, micro_batches + ranks - 1)
    times = {
        place: step_time(place, schedule, moves, teacher)
        for place in (("twin", "first", "filled") if teacher == TEACHER_TO_FILL else ("twin",))
    }
    if schedule == "1f1b" and teacher == TEACHER_TO_FILL:
        times["ahead"] = time_ahead(ranks, micro_batches, teacher)
    return {
        "schedule": schedule,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "teacher_cost": teacher,
        "idle": {place: round(1 - work / time, 4) for place, time in times.items()},
        "formula": round(float(uniform), 4) if schedule in ("gpipe", "1f1b") else None,
        "gain": {place: round(1 - time / times["twin"], 4) for place, time in times.items() if place != "twin"},
        "in_flight": in_flight(moves[0]),
    }


def step_time(place: str, schedule: str, moves: list[list[Move]], teacher: int) -> float:
    """Of a step among many, in student forwards of a stage."""
    lanes = [_lanes(place, each) for each in moves]
    stages = len(moves) * SCHEMES[schedule].per_rank
    needs = _needs(place, stages, [[Action(0, *move) for move in each] for each in moves])
    costs = {"F": 1 + (teacher if place == "twin" else 0), "T": teacher} | BACKWARD
    ends = simulate(lanes, needs, costs)
    last = [0.0] * STEPS
    for action, end in ends.items():
        if action.kind != "T":
            last[action.step] = max(last[action.step], end)
    # the last step has no next one's teacher to run
    return (last[-2] - last[STEADY]) / (STEPS - 2 - STEADY)


def time_ahead(ranks: int, micro_batches: int, teacher: int) -> float:
    """Of a step among many: they take turns in a few lengths, so of many of them."""
    done, times = (0,) * ranks, []
    for _ in range(2 * STEPS):
        order = bubble_schedule(micro_batches, micro_batches, teacher, done)
        done = order.done
        times.append(order.time)
    return sum(times[STEPS:]) / STEPS


def _lanes(place: str, moves: Sequence[Move]) -> list[list[Action]]:
    student = [[Action(step, *move) for move in moves] for step in range(STEPS)]
    teacher = [
        [Action(step, move.stage, "T", move.micro_batch) for move in moves if move.kind == "F"]
        for step in range(STEPS)
    ]
    if place == "twin":
        return [list(itertools.chain(*student))]
    if place == "first":
        return [list(itertools.chain(*(each for pair in zip(teacher, student, strict=True) for each in pair)))]
    return [list(itertools.chain(*student)), list(itertools.chain(*teacher))]


def _needs(place: str, stages: int, moves: list[list[Action]]) -> Callable[[Action], list[Action]]:
    """What has to be done before an action can start."""
    in_parts = {(each.stage, each.micro_batch) for each in itertools.chain(*moves) if each.kind == "I"}
    ends_of_step = [each[-1] for each in moves]

    def gradient(step: int, stage: int, micro_batch: int) -> Action:
        return Action(step, stage, "I" if (stage, micro_batch) in in_parts else "B", micro_batch)

    def needs(action: Action) -> list[Action]:
        step, stage, kind, micro_batch = action
        if kind == "W":
            return [action._replace(kind="I")]
        if kind in "BI":
            own = action._replace(kind="F")
            return [own] if stage + 1 == stages else [own, gradient(step, stage + 1, micro_batch)]
        before = [action._replace(stage=stage - 1)] if stage else []
        if kind == "T":
            # at most one step ahead: the hidden states of two steps' micro-batches are what there is room for
            return before + [each._replace(step=step - 2) for each in ends_of_step if step > 1]
        if place != "twin" and stage + 1 == stages:
            before.append(action._replace(kind="T"))
        return before + [each._replace(step=step - 1) for each in ends_of_step if step]

    return needs


def main() -> None:
    for row in rows((2, 4, 8), (1, 2, 4), (0, 1, 4)):
        print(line(row))


def rows(ranks: Sequence[int], rounds: Sequence[int], teachers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """rounds: micro-batches in multiples of the ranks."""
    for schedule, p, factor, teacher in itertools.product(SCHEDULES, ranks, rounds, teachers):
        yield measure(schedule, p, factor * p, teacher)


def line(row: dict[str, Any]) -> str:
    idle = "  ".join(f"{place} {share:5.1%}" for place, share in row["idle"].items())
    gain = "  ".join(f"{place} {share:5.1%}" for place, share in row["gain"].items())
    formula = "" if row["formula"] is None else f"(p-1)/(m+p-1) {row['formula']:5.1%}"
    return (
        f"{row['schedule']:<12}p {row['ranks']}  m {row['micro_batches']:<3} r {row['teacher_cost']}  "
        f"idle: {idle:<56}{formula:<22}" + (f"gain: {gain}" if gain else "")
    )


if __name__ == "__main__":
    main()
