"""Which charts a run's metrics make: their order, titles, units, and one series per run and side.

Every metric of every run is drawn: the known ones in the order of `CHARTS`, one chart for each term of the loss,
and whatever else a later version writes at the end, under its own key.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from stillhouse.report.reading import Line, Run

NATS = "nats per token"
TOTAL = "loss/total_nats_per_token"
NOT_DRAWN = {"tokens", "seconds", "eval/tokens"}  # they count; the summary has the first two
POINTS = 2000  # per series; a longer one keeps the extremes of each stretch
LOG_FROM = 50.0  # largest over smallest value from which a logarithmic axis shows more than a linear one

Points = list[tuple[float, float | None]]  # (step, value); None is a gap


class Series(TypedDict):
    run: int
    side: str
    steps: list[float]
    values: list[float | None]


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    group: str
    keys: dict[str, str]  # side (drawn solid, then dashed) → metric; one unnamed side for most
    log: bool = False  # may become logarithmic, where the values span enough
    percent: bool = False


@dataclass(frozen=True)
class Drawing:
    """A chart with its data: `log` is decided, `label` says in words what the curve shows."""

    chart: Chart
    series: list[Series]
    log: bool
    label: str


def _sides(key: str) -> dict[str, str]:
    return {side: key.format(side) for side in ("student", "teacher")}


CHARTS = (
    Chart("Held-out cross-entropy", NATS, "Held out", {"": "eval/cross_entropy"}),
    Chart("Held-out forward KL", NATS, "Held out", {"": "eval/forward_kl"}, log=True),
    Chart("Held-out agreement", "of tokens, top 1", "Held out", {"": "eval/agreement"}, percent=True),
    Chart("Held-out entropy", NATS, "Held out", _sides("eval/{}_entropy")),
    Chart("Total loss", NATS, "Training", {"": TOTAL}),
    Chart("Training entropy", NATS, "Training", _sides("train/{}_entropy_nats")),
    Chart("Training agreement", "of tokens, top 1", "Training", {"": "train/agreement"}, percent=True),
    Chart("Gradient norm", "before clipping", "Training", {"": "train/gradient_norm"}, log=True),
    Chart("Learning rate", "per step", "Training", {"": "train/learning_rate"}),
    Chart("Throughput", "tokens per second", "Training", {"": "speed/tokens_per_second"}),
)


def draw(runs: Sequence[Run]) -> list[Drawing]:
    """The charts of these runs, in the page's order; charts without a value are left out."""
    drawings = []
    for chart in _charts(runs):
        series = [
            _series(run.lines, key, index, side) for index, run in enumerate(runs) for side, key in chart.keys.items()
        ]
        series = [one for one in series if any(value is not None for value in one["values"])]
        if series:
            drawings.append(Drawing(chart, series, chart.log and _spans(series), _label(chart, series, runs)))
    return drawings


def _charts(runs: Sequence[Run]) -> list[Chart]:
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line.values if key not in NOT_DRAWN)
    terms = [key for key in keys if key.startswith("loss/") and key != TOTAL]
    charts: list[Chart] = []
    for chart in CHARTS:
        is_total = TOTAL in chart.keys.values()
        if not (is_total and _total_repeats(runs)):
            charts.append(chart)
        if is_total:
            charts += [Chart(_term_title(key), NATS, "Training", {"": key}, log=True) for key in terms]
    drawn = {key for chart in charts for key in chart.keys.values()} | {TOTAL}
    return charts + [Chart(key, "", "Other", {"": key}) for key in keys if key not in drawn]


def _term_title(key: str) -> str:
    name = re.sub("_nats_per_token$", "", key.removeprefix("loss/"))
    return f"Loss: {name}"


def _total_repeats(runs: Sequence[Run]) -> bool:
    """Whether the total says nothing that the terms do not: every run has one term, and it is the total."""
    for run in runs:
        terms = {key for line in run.lines for key in line.values if key.startswith("loss/") and key != TOTAL}
        if len(terms) != 1:
            return False
        term = terms.pop()
        if any(line.values.get(term) != line.values.get(TOTAL) for line in run.lines):
            return False
    return True


def _series(lines: Sequence[Line], key: str, run: int, side: str) -> Series:
    points = _thin(_with_gaps([(line.step, line.values[key]) for line in lines if key in line.values]))
    return Series(
        run=run, side=side, steps=[step for step, _ in points], values=[_rounded(value) for _, value in points]
    )


def _with_gaps(points: Points) -> Points:
    """Steps that are missing become a gap: a distance well over both its neighbours'.

    Both, so that a change of the interval, or a last evaluation soon after the one before, is none.
    """
    distance = [after[0] - before[0] for before, after in itertools.pairwise(points)]
    result = points[:1]
    for index, point in enumerate(points[1:]):
        inner = 0 < index < len(distance) - 1
        if inner and distance[index] > 1.5 * max(distance[index - 1], distance[index + 1]):
            result.append(((points[index][0] + point[0]) / 2, None))
        result.append(point)
    return result


def _thin(points: Points) -> Points:
    """At most `POINTS` points: of each stretch the smallest and the largest, or its gap, so that spikes stay."""
    if len(points) <= POINTS:
        return points
    stretch = math.ceil(len(points) / (POINTS // 2))
    kept: Points = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        # None sorts below every number: a gap takes the place of the smallest value.
        low = min(part, key=lambda point: -math.inf if point[1] is None else point[1])
        high = max(part, key=lambda point: -math.inf if point[1] is None else point[1])
        kept += sorted({low, high}, key=lambda point: point[0])
    return kept


def _spans(series: list[Series]) -> bool:
    values = [value for one in series for value in one["values"] if value is not None]
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _label(chart: Chart, series: list[Series], runs: Sequence[Run]) -> str:
    """The chart in words, for who does not see it."""
    parts = []
    for one in series:
        points = [(s, v) for s, v in zip(one["steps"], one["values"], strict=True) if v is not None]
        name = " ".join(part for part in (runs[one["run"]].path.resolve().name, one["side"]) if part)
        (first_step, first), (last_step, last) = points[0], points[-1]
        parts.append(f"{name} {first:.4g} at step {first_step:g}, {last:.4g} at step {last_step:g}")
    unit = f", {chart.unit}" if chart.unit else ""
    return f"{chart.title}{unit}: {'; '.join(parts)}"
