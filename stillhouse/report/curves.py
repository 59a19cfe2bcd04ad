"""The charts of the runs' metrics, with one series per run and side (student and teacher, for example).

All metrics except `NOT_DRAWN` are drawn. The known metrics come first, in the order of the tables below. The unknown
metrics (for example of a later version) follow, with their keys as titles.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

from stillhouse.output.metrics_file import EVAL_REWARD_PART, REWARD_PART, MetricsLine
from stillhouse.report.run_files import Run

NATS = "nats per token"
TOTAL = "loss/total_nats_per_token"
NOT_DRAWN = {"tokens", "seconds", "eval/tokens"}  # running totals and counts; the summary shows the first two
POINTS = 2000  # the maximum number of points of a series; a longer series keeps the extremes of each section
SET = re.compile(
    r"eval/(?!exact_match/)([^/]+)/(cross_entropy|teacher_cross_entropy|forward_kl|agreement|student_entropy|teacher_entropy)"
)
TASK = "eval/exact_match/"  # followed by a task's name: the key of the share of right answers
LENGTH = "/length_"  # in such a key, before a number: the share for problems of this length
DRAFTS = re.compile(r"eval/mtp_(\d+)/acceptance")
LOG_FROM = 50.0  # the axis is logarithmic if the largest value is at least this many times the smallest value

Points = list[tuple[float, float | None]]  # (step, value); None is a gap


class Series(TypedDict):
    run: int
    side: str
    steps: list[float]
    values: list[float | None]
    means: list[float | None] | None  # if points are left out: the mean of each shown point's section


@dataclass(frozen=True)
class Chart:
    group: str
    title: str
    unit: str
    keys: dict[str, str]  # side (first drawn solid, second dashed) → metric; most charts have one unnamed side
    log: bool = False  # the axis is logarithmic if the values span a large enough range
    percent: bool = False


@dataclass(frozen=True)
class Drawing:
    """A chart with its data. log: whether the axis is initially logarithmic. label: the curves in words."""

    chart: Chart
    series: list[Series]
    log: bool
    label: str

    @property
    def positive(self) -> bool:
        """Whether a logarithmic axis can show all values."""
        return all(value > 0 for value in _values(self.series))


def _sides(key: str) -> dict[str, str]:
    return {side: key.format(side) for side in ("student", "teacher")}


def _means(key: str) -> dict[str, str]:
    return {"mean": key, "largest": f"{key}_max"}


_held_out, _tasks, _training, _rollouts = (
    partial(Chart, group) for group in ("Held out", "Tasks", "Training", "Rollouts")
)

HELD_OUT = (
    _held_out(
        "Held-out cross-entropy", NATS, {"student": "eval/cross_entropy", "teacher": "eval/teacher_cross_entropy"}
    ),
    _held_out("Held-out forward KL", NATS, {"": "eval/forward_kl"}, log=True),
    _held_out("Held-out agreement", "of tokens, top 1", {"": "eval/agreement"}, percent=True),
    _held_out("Held-out entropy", NATS, _sides("eval/{}_entropy")),
    _held_out("Held-out ULD", "per token", {"": "eval/uld"}),
    _held_out("Reverse KL of completions", NATS, {"": "eval/prompts/reverse_kl"}, log=True),
    _held_out("Reward of completions", "mean", {"": "eval/prompts/reward"}),
    _held_out("Length of completions", "tokens, mean", {"": "eval/prompts/completion_tokens"}),
    _held_out("Turns of completions", "mean", {"": "eval/prompts/turns"}),
    _held_out("Calls of tools", "of a completion, mean", {"": "eval/prompts/tool_calls"}),
    _held_out("Errors of tools", "of calls", {"": "eval/prompts/tool_errors"}, percent=True),
    _held_out("Ended completions", "of completions", {"": "eval/prompts/ended"}, percent=True),
)
CUT_ANSWERS = _tasks("Cut answers", "of answers", {"": "eval/tasks_truncated"}, percent=True)
TOTAL_LOSS = _training("Total loss", NATS, {"": TOTAL})
TRAINING = (
    _training("Training entropy", NATS, _sides("train/{}_entropy_nats")),
    _training("Training agreement", "of tokens, top 1", {"": "train/agreement"}, percent=True),
    _training("Mass of the teacher's ids", "of the teacher's distribution", {"": "train/teacher_mass"}, percent=True),
    _training(
        "Acceptance of drafts", "of the teacher's tokens, sampled", {"": "train/sampled_acceptance"}, percent=True
    ),
    _training("Gradient norm", "before clipping", {"": "train/gradient_norm"}, log=True),
    _training("Learning rate", "per step", {"": "train/learning_rate"}),
    _training("Time of a step", "seconds", {"": "speed/step_seconds"}),
    _training("Throughput", "tokens per second", {"": "speed/tokens_per_second"}),
    _training("Rows of a logits tile", "tokens, at most", {"": "speed/chunk_tokens"}),
)
ROLLOUTS = (
    _rollouts("Reward", "mean of a step's completions", {"": "rollout/reward"}),
    _rollouts("Reward, spread", "standard deviation", {"": "rollout/reward_std"}),
    _rollouts("Completion length", "tokens, mean", {"": "rollout/completion_tokens"}),
    _rollouts(
        "Longest and shortest completion",
        "tokens",
        {"longest": "rollout/completion_tokens_max", "shortest": "rollout/completion_tokens_min"},
    ),
    _rollouts("Length of ended completions", "tokens, mean", {"": "rollout/ended_tokens"}),
    _rollouts("Cut completions", "of completions", {"": "rollout/truncated"}, percent=True),
    _rollouts("Turns", "of a completion, mean", {"": "rollout/turns"}),
    _rollouts("Calls of tools", "of a completion, mean", {"": "rollout/tool_calls"}),
    _rollouts("Errors of tools", "of calls", {"": "rollout/tool_errors"}, percent=True),
    _rollouts("Equal rewards", "of prompts, no signal", {"": "rollout/equal_rewards"}, percent=True),
    _rollouts("Own completions", "of completions", {"": "rollout/share"}, percent=True),
    _rollouts("Staleness", "optimizer steps", _means("rollout/staleness")),
    _rollouts("Training against engine", "nats, |log-ratio| at drawn tokens", _means("rollout/log_ratio"), log=True),
    _rollouts(
        "Training against engine, same weights",
        "nats, mean |log-ratio| at drawn tokens",
        {"": "rollout/log_ratio_fresh"},
        log=True,
    ),
    _rollouts("Importance ratio", "mean at drawn tokens", {"": "rollout/ratio"}),
    _rollouts("Limited ratios", "of drawn tokens", {"": "rollout/clipped"}, percent=True),
    _rollouts("Waiting", "of the trainer's time", {"": "speed/waiting"}, percent=True),
    _rollouts("Time of a reward", "seconds of a call, mean", {"": "speed/reward_seconds"}),
    _rollouts("Sampling", "tokens per second", {"": "speed/sampled_tokens_per_second"}),
)


#: for each of several sources of prompts, after rollout/<name>/
OF_SOURCES = (
    _rollouts("Reward", "mean of the source's completions of a step", {"": "reward"}),
    _rollouts("Completion length", "tokens, mean", {"": "completion_tokens"}),
    _rollouts("Cut completions", "of completions", {"": "truncated"}, percent=True),
    _rollouts("Completions", "of the source, in a step", {"": "completions"}),
    _rollouts("Turns", "of a completion, mean", {"": "turns"}),
    _rollouts("Calls of tools", "of a completion, mean", {"": "tool_calls"}),
    _rollouts("Errors of tools", "of calls", {"": "tool_errors"}, percent=True),
    _rollouts("Equal rewards", "of prompts, no signal", {"": "equal_rewards"}, percent=True),
)
SOURCE = re.compile(rf"(?!{REWARD_PART})rollout/([^/]+)/(.+)")


def draw(runs: Sequence[Run]) -> list[Drawing]:
    """Return the charts of these runs in the page's order, without charts that have no value."""
    drawings = []
    for chart in _charts(runs):
        series = [
            _series(run.lines, key, index, side) for index, run in enumerate(runs) for side, key in chart.keys.items()
        ]
        series = [curve for curve in series if _values([curve])]
        if series:
            chart, series = _without_unused_sides(chart, series)
            drawings.append(Drawing(chart, series, chart.log and _spans(series), _label(chart, series, runs)))
    return drawings


def _without_unused_sides(chart: Chart, series: list[Series]) -> tuple[Chart, list[Series]]:
    """Remove the sides that no run has. If only the first side is left, remove its name, too."""
    keys = {side: key for side, key in chart.keys.items() if any(curve["side"] == side for curve in series)}
    if list(keys) == list(chart.keys)[:1]:
        (key,) = keys.values()
        return replace(chart, keys={"": key}), [Series({**curve, "side": ""}) for curve in series]
    return replace(chart, keys=keys), series


def _charts(runs: Sequence[Run]) -> list[Chart]:
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line.values if key not in NOT_DRAWN)
    tasks = sorted((key for key in keys if key.startswith(TASK)), key=lambda key: LENGTH in key)
    terms = [key for key in keys if key.startswith("loss/") and key != TOTAL]
    charts = [
        *(_task(key) for key in tasks),
        *HELD_OUT,
        *(_eval_reward_part(key) for key in keys if key.startswith(EVAL_REWARD_PART)),
        *_charts_of_sets(keys),
        CUT_ANSWERS,
        *([] if _total_repeats(runs) else [TOTAL_LOSS]),
        *(_term(key) for key in terms),
        *TRAINING,
        *ROLLOUTS,
        *(_reward_part(key) for key in keys if key.startswith(REWARD_PART)),
        *_charts_of_sources(keys),
    ]
    for draft in filter(None, map(DRAFTS.fullmatch, keys)):
        sides = {"greedy": draft[0], "sampled": draft[0].replace("/acceptance", "/sampled_acceptance")}
        charts.append(_held_out(f"Accepted drafts, depth {draft[1]}", "of tokens", sides, percent=True))
    shown = {key for chart in charts for key in chart.keys.values()} | {TOTAL}
    return charts + [Chart("Other", key, "", {"": key}) for key in keys if key not in shown]


def _charts_of_sets(keys: Iterable[str]) -> list[Chart]:
    names = dict.fromkeys(match[1] for match in map(SET.fullmatch, keys) if match)
    return [
        replace(
            chart,
            group=f"Held out: {name}",
            keys={side: key.replace("eval/", f"eval/{name}/", 1) for side, key in chart.keys.items()},
        )
        for name in names
        for chart in HELD_OUT
    ]


def _charts_of_sources(keys: Iterable[str]) -> Iterator[Chart]:
    """The charts of each source of prompts: its completions, and the terms of the loss at its tokens."""
    matches = [match for match in map(SOURCE.fullmatch, keys) if match]
    for name in dict.fromkeys(match[1] for match in matches):
        group, prefix = f"Prompts: {name}", f"rollout/{name}/"
        for chart in OF_SOURCES:
            yield replace(chart, group=group, keys={"": prefix + chart.keys[""]})
        for match in matches:
            if match[1] == name and match[2].startswith("reward/"):
                title = f"Reward: {match[2].removeprefix('reward/')}"
                yield Chart(group, title, "mean, without its weight", {"": match[0]})
            if match[1] == name and match[2].endswith("_nats_per_token"):
                title = f"Loss: {match[2].removesuffix('_nats_per_token')}"
                yield Chart(group, title, NATS, {"": match[0]}, log=True)


def _task(key: str) -> Chart:
    task = key.removeprefix(TASK).replace(LENGTH, ", length ")
    return _tasks(f"Exact match: {task}", "of answers", {"": key}, percent=True)


def _reward_part(key: str) -> Chart:
    return _rollouts(f"Reward: {key.removeprefix(REWARD_PART)}", "mean, without its weight", {"": key})


def _eval_reward_part(key: str) -> Chart:
    name = key.removeprefix(EVAL_REWARD_PART)
    return _held_out(f"Reward of completions: {name}", "mean, without its weight", {"": key})


def _term(key: str) -> Chart:
    """The chart of a term of the loss. A term that is computed inside layers has no unit."""
    name = re.sub("(_nats)?_per_token$", "", key.removeprefix("loss/"))
    return _training(f"Loss: {name}", NATS if "_nats_" in key else "per token", {"": key}, log=True)


def _total_repeats(runs: Sequence[Run]) -> bool:
    """Whether the total loss is redundant: every run has one term, and the term's values equal the total."""
    for run in runs:
        terms = {key for line in run.lines for key in line.values if key.startswith("loss/") and key != TOTAL}
        if len(terms) != 1:
            return False
        term = terms.pop()
        if not all(_is_close(line.values.get(term), line.values.get(TOTAL)) for line in run.lines):
            return False
    return True


def _is_close(a: float | None, b: float | None) -> bool:
    """Whether two values differ by no more than the rounding of float32."""
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=1e-6)


def _series(lines: Sequence[MetricsLine], key: str, run: int, side: str) -> Series:
    points = _with_gaps([(line.step, line.values[key]) for line in lines if key in line.values])
    shown = _thin(points)
    return Series(
        run=run,
        side=side,
        steps=[step for step, _ in shown],
        values=[_rounded(value) for _, value in shown],
        means=None if len(shown) == len(points) else _section_means(points, shown),
    )


def _section_means(points: Points, shown: Points) -> list[float | None]:
    """For each shown point, the mean of its section: the smoothed curve must not be computed from extremes only."""
    means: dict[float, float] = {}
    for section in _sections(points):
        values = [value for _, value in section if value is not None]
        if values:
            means |= dict.fromkeys((step for step, _ in section), sum(values) / len(values))
    return [None if value is None else _rounded(means[step]) for step, value in shown]


def _with_gaps(points: Points) -> Points:
    """Insert a gap between two points whose distance is well above both neighbouring distances.

    Both are compared, so that there is no gap where the logging interval changes, or before a shorter last interval.
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


def _spans(series: list[Series]) -> bool:
    values = _values(series)
    return min(values) > 0 and max(values) / min(values) >= LOG_FROM


def _values(series: Iterable[Series]) -> list[float]:
    return [value for curve in series for value in curve["values"] if value is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _label(chart: Chart, series: list[Series], runs: Sequence[Run]) -> str:
    """Return the chart in words, for readers who cannot see it."""
    parts = []
    for curve in series:
        points = [(s, v) for s, v in zip(curve["steps"], curve["values"], strict=True) if v is not None]
        name = " ".join(part for part in (runs[curve["run"]].path.resolve().name, curve["side"]) if part)
        (first_step, first), (last_step, last) = points[0], points[-1]
        parts.append(f"{name} {first:.4g} at step {first_step:g}, {last:.4g} at step {last_step:g}")
    unit = f", {chart.unit}" if chart.unit else ""
    return f"{chart.title}{unit}: {'; '.join(parts)}"
