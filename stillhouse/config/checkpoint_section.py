"""Which checkpoints a run writes and keeps, and from which checkpoint it resumes."""

import re
from typing import Annotated, Literal, get_args

from pydantic import Field

from stillhouse.config.section import PathText, Section

#: a metric of one of several evaluation sets; the pattern below also matches metrics of eval.callbacks
SET_METRIC = r"^eval/[A-Za-z0-9_-]+/(cross_entropy|forward_kl|agreement)$"
MetricOfCallback = Annotated[str, Field(pattern=r"^eval/[\w.\-/]+$", examples=["eval/math/cross_entropy"])]

Known = Literal[
    "eval/cross_entropy",
    "eval/forward_kl",
    "eval/agreement",
    "eval/exact_match/sums",
    "eval/exact_match/reversal",
    "eval/exact_match/brackets",
    "eval/prompts/reverse_kl",
    "eval/prompts/reward",
]
KNOWN = get_args(Known)


def set_of(metric: str | None) -> str | None:
    """The name of the evaluation set that has a metric; None if it is not one set's metric."""
    return metric.split("/")[1] if metric and re.match(SET_METRIC, metric) else None


def is_of_callback(metric: str | None) -> bool:
    """Whether a metric is from eval.callbacks: it belongs neither to every run nor to an evaluation set."""
    return metric is not None and metric not in KNOWN and set_of(metric) is None


def compares_with_teacher(metric: str | None) -> bool:
    """Whether a metric compares the student with a teacher."""
    return (metric or "").endswith(("/forward_kl", "/agreement"))


class CheckpointConfig(Section):
    """Which checkpoints a run writes and keeps, and from which checkpoint it resumes."""

    every: int = Field(default=500, ge=0)
    """Steps between two checkpoints. 0: only one checkpoint, at the end."""
    keep: int = Field(default=2, ge=1)
    """How many of the latest checkpoints are kept, in addition to the best one."""
    best: Known | MetricOfCallback | None = "eval/cross_entropy"
    """The checkpoint with the best value of this metric is kept: the lowest, or the highest for agreement and for the
    exact match of a task in eval.tasks and the reward of eval.prompts. eval/name/…: of one of several sets in
    data.eval. eval/name: of eval.callbacks. null: none, and a checkpoint causes no evaluation. No effect without
    evaluation."""
    greater_is_better: bool | None = None
    """Of a metric of eval.callbacks in checkpoint.best: whether its highest value is the best one. null: for all
    other metrics, of which it is known."""
    resume: PathText = Field(default="auto", examples=["auto", "never", "runs/a/checkpoints/step-500"])
    """auto: resume from the latest checkpoint in out, or start anew if there is none; never: start anew; a path:
    start from that checkpoint."""
    fallback: bool = False
    """true: if the latest checkpoint in out is damaged, rename it and resume from the one before it. false: stop with
    an error that describes the damage."""

    @property
    def best_of_callback(self) -> bool:
        return is_of_callback(self.best)
