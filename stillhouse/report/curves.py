"""The charts of the runs' metrics.

Metrics with the same title are sides of one chart, such as "student" and "teacher". A chart has one series for each
run and side. All metrics are drawn, except those without a group in the table of metrics. The metrics of the table
come first, in its order. The unknown metrics (for example of a later version) follow, with their keys as titles.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

from stillhouse.output.json_lines import MetricsLine
from stillhouse.output.metrics import LENGTH, TOTAL, Metric, matched, metric_table
from stillhouse.report.run_files import Run

POINTS = 2000  # the maximum number of points of a series; a longer series keeps the extremes of each section
LOG_FROM = 50.0  # the axis is logarithmic if the largest value is at least this many times the smallest value

Points = list[tuple[float, float | None]]  # (step, value); None is a gap


class Series(TypedDict):
    run: int
    side: str
    steps: list[float]
    values: list[float | None]
    means: list[float | None] | None  # the mean of each shown point's section; None if all points are shown


@dataclass(frozen=True)
class Chart:
    """A chart, and the metrics that it draws.

    keys: the key of the metric of each side; the first side has solid lines. Most charts have one unnamed side.
    log: whether the page first shows a logarithmic axis. `draw_charts` changes this to False if the values do not
        span a large range, or are not all positive. positive: whether a logarithmic axis can show all values.
    explanations: a sentence for each metric. label: the curves in words, for readers who cannot see them.
    """

    group: str
    title: str
    unit: str
    keys: dict[str, str]
    log: bool = False
    percent: bool = False
    explanations: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    positive: bool = True
    label: str = ""

    @property
    def constants(self) -> dict[tuple[int, str], float]:
        """The value of each series, by its run and side, if every series has several equal points; else {}."""
        constants = dict[tuple[int, str], float]()
        for curve in self.series:
            points = [value for value in curve["values"] if value is not None]
            if len(points) < 2 or min(points) < max(points):
                return {}
            constants[curve["run"], curve["side"]] = points[0]
        return constants


def constant_in_words(chart: Chart, names: Sequence[str]) -> str:
    """The value of a constant chart, or the value of each run and side. names: the names of the runs."""
    texts = {
        " ".join(filter(None, (names[run] if len(names) > 1 else "", side))): (
            f"{100 * value:.4g} %" if chart.percent else f"{value:.6g}"
        )
        for (run, side), value in chart.constants.items()
    }
    words = next(iter(texts.values()))
    if len(set(texts.values())) > 1:
        words = ", ".join(f"{name} {text}" for name, text in texts.items())
    return f"{words} {chart.unit}".rstrip()


def draw_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of these runs in the page's order. Charts without values are left out."""
    drawn = []
    for chart in _charts(runs):
        series = [
            _series(run.lines, key, index, side) for index, run in enumerate(runs) for side, key in chart.keys.items()
        ]
        series = [curve for curve in series if any(value is not None for value in curve["values"])]
        if not series:
            continue
        # leave out the sides that no run has; if only the first side remains, leave out its name, too
        keys = {side: key for side, key in chart.keys.items() if any(curve["side"] == side for curve in series)}
        if list(keys) == list(chart.keys)[:1]:
            keys, series = {"": next(iter(keys.values()))}, [Series({**curve, "side": ""}) for curve in series]
        values = [value for curve in series for value in curve["values"] if value is not None]
        positive = min(values) > 0
        log = chart.log and positive and max(values) / min(values) >= LOG_FROM
        words = []
        for curve in series:
            points = [(s, v) for s, v in zip(curve["steps"], curve["values"], strict=True) if v is not None]
            name = " ".join(filter(None, (runs[curve["run"]].path.resolve().name, curve["side"])))
            (first_step, first), (last_step, last) = points[0], points[-1]
            words.append(f"{name} {first:.4g} at step {first_step:g}, {last:.4g} at step {last_step:g}")
        label = f"{', '.join(filter(None, (chart.title, chart.unit)))}: {'; '.join(words)}"
        drawn.append(replace(chart, keys=keys, series=series, log=log, positive=positive, label=label))
    return drawn


def _charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts of all known metrics, in the order of their table, and of the runs' unknown metrics."""
    matches: dict[Metric, list[tuple[str, ...]]] = {metric: [] for metric in metric_table()}
    charts, unknown = dict[tuple[str, str], Chart](), list[Chart]()
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line.values)
    for key in sorted(keys, key=lambda key: LENGTH in key):
        if (match := matched(key)) is not None:
            matches[match[0]].append(match[1])
        else:
            unknown.append(Chart("Other", key, "", {"": key}))
    undrawn = {""} if not _total_repeats(runs) else {"", TOTAL}
    # all charts of one held-out set or source of prompts come before those of the next
    for _, block in itertools.groupby(matches, lambda metric: metric.group if "{" in metric.group else metric.title):
        rows = [metric for metric in block if not undrawn & {metric.group, metric.key}]
        firsts = dict.fromkeys(names[:1] for metric in rows for names in matches[metric])
        for first in firsts or [()]:
            for metric in rows:
                same_first = [names for names in matches[metric] if names[:1] == first]
                is_side = metric.side and metric.key.count("{") == len(
                    first
                )  # another metric of the chart may have values
                for names in same_first or ([first] if is_side else []):
                    # add the metric to the chart that has its title, or to a new chart
                    side = metric.named(*names)
                    new = Chart(side.group, side.title, side.unit, {}, side.log, side.percent)
                    chart = charts.setdefault((side.group, side.title), new)
                    chart.keys[side.side] = side.key
                    chart.explanations.append(side.explanation)
    return [*charts.values(), *unknown]


def _total_repeats(runs: Sequence[Run]) -> bool:
    """Return whether the total loss is redundant, because every run has only one term, which equals the total."""
    for run in runs:
        terms = {key for line in run.lines for key in line.values if key.startswith("loss/") and key != TOTAL}
        if len(terms) != 1:
            return False
        term = terms.pop()
        for line in run.lines:
            value, total = line.values.get(term), line.values.get(TOTAL)
            # the two values may differ by the rounding of float32
            if value != total and (value is None or total is None or not math.isclose(value, total, rel_tol=1e-6)):
                return False
    return True


def _series(lines: Sequence[MetricsLine], key: str, run: int, side: str) -> Series:
    points = _with_gaps([(line.step, line.values[key]) for line in lines if key in line.values])
    shown = _thin(points)
    means: dict[float, float] = {}
    for section in _sections(points) if len(shown) < len(points) else ():
        numbers = [value for _, value in section if value is not None]
        if numbers:  # the smoothed curve must not be computed from extremes only
            means |= dict.fromkeys((step for step, _ in section), sum(numbers) / len(numbers))
    steps = [step for step, _ in shown]
    values = [None if value is None else float(f"{value:.6g}") for _, value in shown]
    shown_means = [None if value is None else float(f"{means[step]:.6g}") for step, value in shown] if means else None
    return Series(run=run, side=side, steps=steps, values=values, means=shown_means)


def _with_gaps(points: Points) -> Points:
    """Insert a gap between two points if their distance is over 1.5 times the previous and the next distance.

    If one of the two comparisons were enough, a change of the logging interval, or a shorter last interval, would
    cause a gap.
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
    """Return at most `POINTS` points: the smallest (or a gap) and the largest of each section, to keep spikes."""
    if len(points) <= POINTS:
        return points
    kept: Points = []
    for part in _sections(points):
        # None sorts below every number, so a gap replaces the smallest value.
        low = min(part, key=lambda point: -math.inf if point[1] is None else point[1])
        high = max(part, key=lambda point: -math.inf if point[1] is None else point[1])
        kept += sorted({low, high}, key=lambda point: point[0])
    return kept


def _sections(points: Points) -> Iterator[Points]:
    stretch = math.ceil(len(points) / (POINTS // 2))
    return (points[start : start + stretch] for start in range(0, len(points), stretch))
