"""The keys of evaluations on held-out documents and tasks, and of checkpoints."""

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from stillhouse.config.reward_sum import RewardText
from stillhouse.config.section import FunctionPath, PathText, Section, Text
from stillhouse.config.servers import RewardTokens
from stillhouse.tasks import TaskSpec

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
    """The name of the evaluation set to which a metric belongs; None if it does not belong to a single set."""
    return metric.split("/")[1] if metric and re.match(SET_METRIC, metric) else None


def is_of_callback(metric: str | None) -> bool:
    """Whether a metric is from eval.callbacks: it is neither in `KNOWN` nor a metric of an evaluation set."""
    return metric is not None and metric not in KNOWN and set_of(metric) is None


def compares_with_teacher(metric: str | None) -> bool:
    """Whether a metric compares the student with a teacher."""
    return (metric or "").endswith(("/forward_kl", "/agreement"))


def _checked_tasks(tasks: list[str]) -> list[str]:
    names = [TaskSpec.parse(text).name for text in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"got {', '.join(tasks)}, expected each task once")
    return tasks


class EvalPromptsConfig(Section):
    """Held-out prompts that the student completes at each evaluation, without reference completions. Tools,
    environment, turns and workers are set in the section rollout."""

    data: Text = Field(examples=["data/held_out_prompts.jsonl"])
    """The prompts: a source as in data.train. The student reads only the prompt of a record; reward gets the whole
    record."""
    count: int = Field(default=64, ge=1)
    """The maximum number of prompts. The same prompts are used at each evaluation and in each run on this data."""
    max_new_tokens: int = Field(default=256, ge=1)
    """The most tokens of a completion, with its end of sequence and its replies; less than data.max_tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """0: greedy completions. Above 0: tokens are sampled, with the same seeds at each evaluation."""
    reward: RewardText | None = Field(default=None, examples=["mypkg.rewards:exact"])
    """The reward of every completion, as in rollout.reward: a function, a server, environment, or a weighted sum of
    them, whose parts are metrics, too. null: no reward."""
    reward_tokens: RewardTokens | None = Field(default=None, examples=[{"http://10.0.0.9:9000": "REWARD_TOKEN"}])
    """The environment variables with the tokens of servers in reward, in the form of rollout.reward_tokens."""


class EvalConfig(Section):
    """Evaluations: cross-entropy, forward KL, agreement and entropies on data.eval (if it is not 0), and tasks."""

    every: int = Field(default=100, ge=0)
    """Steps between two evaluations. Checkpoints are evaluated, too, unless checkpoint.best is null. 0: only at the
    start and at the end."""
    patience: int | None = Field(default=None, ge=1, examples=[3])
    """Early stopping: training ends after this many evaluations in a row without a new best value of the metric in
    checkpoint.best. The evaluation before training does not count. Each new best value causes a checkpoint, and the
    final model has the weights of the best checkpoint, also if training does not end early. null: train all steps,
    and the final model has the last weights."""
    micro_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one micro-batch of an evaluation. null: the value of train.micro_batch_tokens."""
    tasks: Annotated[list[Text], AfterValidator(_checked_tasks)] = Field(default=[], examples=["sums", "sums(2:4)"])
    """Tasks whose held-out problems the student completes greedily at each evaluation: sums, reversal or brackets,
    each also with a range of lengths, such as sums(2:4). eval/exact_match is the share of correct completions."""
    task_count: int = Field(default=200, ge=1)
    """The number of problems of each task. All lengths of the task occur in turn."""
    task_tokens: int = Field(default=64, ge=1)
    """The most tokens of a completion for eval.tasks, eval.samples and eval.callbacks, with its end of sequence."""
    samples: int = Field(default=0, ge=0, le=64)
    """The number of prompts of data.eval that the student completes greedily at each evaluation. The completions are
    in eval_samples.jsonl, and the report shows how they change during the run. The file also has the same number of
    completions of eval.prompts with their rewards, or 4 if this key is 0."""
    prompts: EvalPromptsConfig | None = None
    """Prompts without completions. Their metrics are eval/prompts/reverse_kl (between student and teacher, on the
    student's completions), completion_tokens, ended (the share of completions that end), reward and the parts of the
    reward. null: no such prompts."""
    callbacks: list[FunctionPath] = Field(default=[], examples=["my_evaluations:accuracy"])
    """Your own Python functions (package.module:function), which rank 0 calls at each evaluation. Each function gets
    a context and returns a dict of names and numbers, which are logged as eval/<name>."""


class CheckpointConfig(Section):
    """Which checkpoints a run writes and keeps, and from which checkpoint it resumes."""

    every: int = Field(default=500, ge=0)
    """Steps between two checkpoints. 0: a single checkpoint at the end."""
    keep: int = Field(default=2, ge=1)
    """The number of latest checkpoints that are kept in addition to the best checkpoint."""
    best: Known | MetricOfCallback | None = "eval/cross_entropy"
    """The checkpoint with the best value of this metric is kept. The best value is the lowest one, but the highest
    one for agreement, the exact match of eval.tasks and the reward of eval.prompts. eval/name/…: a metric of one of
    several sets in data.eval. eval/name: a metric of eval.callbacks. null: no best checkpoint, and a checkpoint
    causes no evaluation. No effect without evaluation."""
    greater_is_better: bool | None = None
    """For a metric of eval.callbacks in checkpoint.best. true: its highest value is the best. false: its lowest value
    is the best. null: for all other metrics, whose best value is known."""
    resume: PathText = Field(default="auto", examples=["auto", "never", "runs/a/checkpoints/step-500"])
    """auto: resume from the latest checkpoint in out, or start anew if there is none; never: start anew; a path:
    start from that checkpoint. A complete run that is started again only compares its model with hashes.json."""
    fallback: bool = False
    """true: if the latest checkpoint in out is damaged, rename it and resume from the previous one. false: stop with
    an error that describes the damage."""
