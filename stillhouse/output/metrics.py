"""The metrics of a run as one table, metrics.toml, which the log, the report, trackers and warnings read.

In a key of the table, {0} and {1} are placeholders for names from the configuration: a loss term, a task, a part of a
reward, a held-out set or a source of prompts. A metric that is not in the table is reported under its key.
"""

import math
import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

#: the reward of the completions of a training step
REWARD = "rollout/reward"
#: the prefix of the keys for the parts of a reward; the name of a part follows
REWARD_PART = "rollout/reward/"
#: the prefix of the keys for a task's share of right answers; the name of a task follows
TASK = "eval/exact_match/"
#: separates a task's name from a length in the key of the metric for problems of this length
LENGTH = "/length_"
#: the number of evaluations since the last new best value, which eval.patience limits
WITHOUT_BEST = "train/evaluations_without_best"
#: the scaled sum of the terms of the loss
TOTAL = "loss/total_nats_per_token"


@dataclass(frozen=True)
class Metric:
    """A metric, and its presentation in logs and reports.

    key: the key, with {0} and {1} for names. title: the title of its chart; metrics with one title share a chart.
    unit: the unit of the values. explanation: a sentence about the metric.
    group: the group of its chart in the report; "" for a metric without a chart.
    side: the name of its curve, if the chart has several curves.
    reduction: the function that reduces the values of tokens, completions or calls to one value.
    log: whether the axis is logarithmic if the values span a large range. percent: whether a value is a share.
    figure: the format in the live line of a run; "" if the line does not show the metric.
    warn_above: the limit for a warning of the run; larger values cause it.
    """

    key: str
    title: str
    unit: str
    explanation: str
    group: str = ""
    side: str = ""
    reduction: Literal["mean", "largest", "smallest", "deviation", "sum"] = "mean"
    log: bool = False
    percent: bool = False
    figure: str = ""
    warn_above: float = math.inf

    def text(self, value: float) -> str:
        """A value as text, without its unit."""
        return f"{100 * value:.1f} %" if self.percent else f"{value:.3f}"

    def named(self, *names: str) -> "Metric":
        """Return the metric with these names in its key, title and group."""
        key, title, group = (text.format(*names) for text in (self.key, self.title, self.group))
        return replace(self, key=key, title=title.replace(LENGTH, ", length "), group=group)


def headline(keys: Collection[str]) -> list[str]:
    """Select the metrics that summarise a run: results on held-out prompts, tasks and documents, in this order."""
    tasks = [key for key in keys if key.startswith(TASK) and LENGTH not in key]
    order = ["eval/prompts/reward", *tasks, "eval/prompts/reverse_kl", "eval/cross_entropy", "eval/forward_kl"]
    return [key for key in [*order, "eval/agreement", REWARD] if key in keys]


def is_greater_better(metric: str, greater: bool | None = None) -> bool:
    """Return whether a higher value of a metric is better.

    greater: checkpoint.greater_is_better. None means true for agreement, exact match and the reward of prompts, and
        false for other metrics.
    """
    if greater is not None:
        return greater
    return metric.startswith("eval/exact_match") or metric.endswith(("/agreement", "prompts/reward"))


def ended_early(metric: str, patience: int) -> str:
    """The reason why eval.patience has ended a training."""
    return f"no new best {metric} in the last {patience} evaluations (eval.patience)"


@cache
def metric_table() -> tuple[Metric, ...]:
    """All metrics, in the order of the report."""
    rows = tomllib.loads(files("stillhouse.output").joinpath("metrics.toml").read_text())["metric"]
    return tuple(Metric(**row) for row in rows)


@cache
def matched(key: str) -> tuple[Metric, tuple[str, ...]] | None:
    """Return the metric of a key and the names in the key; None if the table has no such metric.

    A name that is followed by a slash contains no slash.
    """
    for metric in metric_table():
        pattern = re.sub(r"\\\{\d\\\}(?=/)", "([^/]+)", re.escape(metric.key))
        if match := re.fullmatch(re.sub(r"\\\{\d\\\}", "(.+)", pattern), key):
            return metric, match.groups()
    return None


def known_metric(key: str) -> Metric:
    """The metric of a key, with the names from the key. A metric that is not in the table has its key as title."""
    match = matched(key)
    return Metric(key, key, "", "") if match is None else match[0].named(*match[1])
