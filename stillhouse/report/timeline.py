"""The timeline of an on-policy run: the work of all parts of the job during the trainer's last steps.

Each part of the job has a lane. Spans of one lane that overlap in time are in different rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stillhouse.display import escaped
from stillhouse.output.records import LANES, WAIT, TimelineSpan

STEPS = 12  # the number of the trainer's steps that are shown
ROWS = 8  # the maximum number of rows of a lane; if more spans overlap in time, their boxes overlap
STEP_LABELS = 8
SHORTEST = 1e-4  # seconds; no timeline is drawn for a shorter time
WHAT = 60  # the maximum number of characters of a span's name


@dataclass(frozen=True)
class Box:
    """One span in the timeline; left and width in percent of the shown time."""

    left: float
    width: float
    row: int
    label: str
    title: str
    waits: bool
    odd: bool


@dataclass(frozen=True)
class Lane:
    """shares: what the lane did, with its percentage of the shown time; they add up to 100."""

    name: str
    boxes: list[Box]
    rows: int
    shares: list[tuple[str, int]]


@dataclass(frozen=True)
class Timeline:
    """first, last: the range of shown steps.
    start, seconds: the shown time, in seconds of the run.
    waiting: the share of the time of the trainer's steps in which it waited: the mean of `speed/waiting` with the
        steps' seconds as weights. None if there is no trainer.
    marks, ticks: pairs (left in percent, text).
    """

    first: int
    last: int
    start: float
    seconds: float
    waiting: float | None
    lanes: list[Lane]
    marks: list[tuple[float, str]]
    ticks: list[tuple[float, str]]


def timeline(spans: Sequence[TimelineSpan]) -> Timeline | None:
    """Return the timeline of the trainer's last steps, or of the last steps of all lanes if there is no trainer."""
    step_spans = [span for span in spans if span.lane == "trainer"] or list(spans)
    shown = sorted({span.step for span in step_spans})[-STEPS:]
    begins = {step: min(span.start for span in step_spans if span.step == step) for step in shown}
    if not shown:
        return None
    start = min(begins.values())
    inside = [span for span in spans if span.stop > start]
    seconds = max((span.stop for span in inside), default=start) - start
    if seconds < SHORTEST:
        return None
    every = math.ceil(len(shown) / STEP_LABELS)
    marks = [
        (_percent(begins[step] - start, seconds), f"{step:,}" if index % every == 0 else "")
        for index, step in enumerate(shown)
    ]
    lanes = [_lane(name, [span for span in inside if span.lane == name], start, seconds) for name in LANES]
    trainer_spans = [span for span in inside if span.lane == "trainer"]
    in_steps = _covered(_whole_steps(trainer_spans), start)
    waiting = _covered(_waits(trainer_spans), start) / in_steps if in_steps else None
    return Timeline(shown[0], shown[-1], start, seconds, waiting, lanes, marks, _ticks(seconds))


def _lane(name: str, spans: list[TimelineSpan], start: float, seconds: float) -> Lane:
    boxes: list[Box] = []
    free_at: list[float] = []  # for each row, the end of its last span
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        row = next((row for row, free in enumerate(free_at) if free <= span.start), len(free_at))
        if row == ROWS:
            row = free_at.index(min(free_at))
        free_at[row:] = [span.stop, *free_at[row + 1 :]]
        begin = max(span.start, start)
        what = escaped(span.what if len(span.what) <= WHAT else f"{span.what[: WHAT - 3]}...")
        boxes.append(
            Box(
                left=_percent(begin - start, seconds),
                width=_percent(span.stop - begin, seconds),
                row=row,
                label=what,
                title=f"step {span.step:,}, {what}: {span.stop - span.start:.3g} s, "
                f"from {span.start:.2f} to {span.stop:.2f}",
                waits=name == "trainer" and span.what.startswith(WAIT),
                odd=span.step % 2 == 1,
            )
        )
    rows = max(1, len(free_at))
    covered = _covered(_whole_steps(spans) if name == "trainer" else spans, start)
    waited = _covered(_waits(spans), start) if name == "trainer" else 0.0
    parts = {"busy": covered - waited, "waiting": waited, "between its steps": seconds - covered}
    if name != "trainer":
        parts = {"busy": covered, "idle": seconds - covered}
    return Lane(name, boxes, rows, _percentages(parts, seconds))


def _percentages(parts: dict[str, float], total: float) -> list[tuple[str, int]]:
    """Return whole percentages that add up to 100: those with the largest remainders are rounded up."""
    exact = {name: 100 * part / total for name, part in parts.items()}
    whole = {name: math.floor(percent) for name, percent in exact.items()}
    by_remainder = sorted(exact, key=lambda name: whole[name] - exact[name])
    for name in by_remainder[: 100 - sum(whole.values())]:
        whole[name] += 1
    return list(whole.items())


def _waits(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    return [span for span in spans if span.what.startswith(WAIT)]


def _whole_steps(spans: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Join the spans of each step. Evaluations and checkpoints are between steps, so they are not included."""
    steps = dict[int, TimelineSpan]()
    for span in spans:
        step = steps.get(span.step, span)
        steps[span.step] = replace(span, start=min(step.start, span.start), stop=max(step.stop, span.stop))
    return list(steps.values())


def _covered(spans: list[TimelineSpan], start: float) -> float:
    """Return how many seconds after `start` are covered by at least one span."""
    covered, until = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.stop - max(span.start, until))
        until = max(until, span.stop)
    return covered


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Return at most six round times since the timeline's start, with their positions in percent."""
    power = 10 ** math.floor(math.log10(seconds / 5))
    every = next(size * power for size in (1, 2, 5, 10) if seconds / (size * power) <= 5)
    return [
        (_percent(number * every, seconds), f"{number * every:.6g} s") for number in range(int(seconds / every) + 1)
    ]


def _percent(part: float, total: float) -> float:
    return round(100 * part / total, 3)
