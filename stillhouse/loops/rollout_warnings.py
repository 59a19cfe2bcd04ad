"""Warnings about samples from which a run cannot learn as its configuration intends. Each warning is given once."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from stillhouse.config import RolloutConfig
from stillhouse.display import name_list
from stillhouse.output.metrics import known_metric
from stillhouse.parallel import log_rank0
from stillhouse.rollout import PromptPlan, Sample

#: a warning is given if many completions are cut (see the table of metrics) and if, compared to the first FIRST_STEPS
#: steps, the mean length is more than LONGER times as large or the share of cut completions is larger by more than
#: MORE_CUT
LONGER, FIRST_STEPS = 2.0, 5
MORE_CUT = 0.3
#: a warning is given after this number of steps without a call or a reply, of steps in which every completion is cut,
#: or of steps in which the rewards of every prompt are equal
SILENT_STEPS = 5
#: a warning is given if calls in the process of rank 0 take a larger share of a step's time
MOST_OF_STEP = 0.5


class RolloutWarnings:
    """Prints the warnings, each at most once after the run was started or resumed.

    rollouts: the section rollout for each source of prompts.
    noise: the names of the dropouts with which the student is trained.
    """

    def __init__(self, plan: PromptPlan, rollouts: Sequence[RolloutConfig], noise: Collection[str] = ()):
        self._plan, self._rollouts = plan, rollouts
        self._noise = f", or the cause is the student's dropout in training ({name_list(noise)})" if noise else ""
        self._first: list[tuple[float, float]] = []  # mean length, and share of cut completions
        self._equal_steps = 0  # the number of successive steps in which all rewards of every prompt are equal
        self._cut_steps = self._cut_samples = 0  # both count from the last step with a completion that was not cut
        # of samples that can have several turns: the numbers of steps, samples, cut samples, samples with a reply
        self._steps = self._count = self._cut = self._replied = 0
        self._warned: set[str] = set()

    def watch(self, samples: Sequence[Sample], metrics: Mapping[str, float]) -> None:
        """Warn about the samples of a step, if there is a reason. metrics: the metrics of the step."""
        self._watch_length(metrics)
        self._watch_ends(samples)
        self._watch_replies(samples)
        self._watch_rewards(metrics)
        self._watch_ratios(metrics)

    def watch_calls(self, times: Mapping[str, tuple[int, float]], seconds: float) -> None:
        """Warn if a step spent most of its time in functions of the user that run one after the other.

        times: the number and the seconds of the calls in this step, by the keys of their functions.
        seconds: the time of the step.
        """
        spent = sum(duration for _, duration in times.values())
        if not self._rollouts[0].workers and spent > MOST_OF_STEP * seconds:
            count = sum(count for count, _ in times.values())
            self._warn(
                "calls",
                f"{count:,} calls of {name_list(times)}, one after the other, took {spent:.3g} s of the "
                f"{seconds:.3g} s of a step: rollout.workers makes many calls at once, with the same results",
            )

    def _watch_length(self, metrics: Mapping[str, float]) -> None:
        length, cut = metrics["rollout/completion_tokens"], metrics["rollout/truncated"]
        if len(self._first) < FIRST_STEPS:
            self._first.append((length, cut))
        usual, usually_cut = (statistics.fmean(values) for values in zip(*self._first, strict=True))
        many = known_metric("rollout/truncated").warn_above
        if cut > many and (length > LONGER * usual or cut > usually_cut + MORE_CUT):
            self._warn(
                "length",
                f"completions have {length:.0f} tokens on average, {usual:.0f} in the first steps, and "
                f"{cut:.0%} of them are cut at rollout.max_new_tokens: the student does "
                "not stop any more. With rollout.truncated=mask, it is not trained on cut completions",
            )

    def _watch_ends(self, samples: Sequence[Sample]) -> None:
        if any(sample.completion.finish != "length" for sample in samples):
            self._cut_steps = self._cut_samples = 0
            return
        self._cut_steps, self._cut_samples = self._cut_steps + 1, self._cut_samples + len(samples)
        if self._cut_steps == SILENT_STEPS:
            self._warn(
                "ends",
                f"all {self._cut_samples:,} completions of the last {SILENT_STEPS} steps are cut at "
                "rollout.max_new_tokens: expected a larger value, or a student that ends its completions",
            )

    def _watch_rewards(self, metrics: Mapping[str, float]) -> None:
        if metrics.get("rollout/equal_rewards") != 1:
            self._equal_steps = 0
            return
        self._equal_steps += 1
        if self._equal_steps == SILENT_STEPS:
            self._warn(
                "rewards",
                f"in the last {SILENT_STEPS} steps, all completions of a prompt had the same reward, on average "
                f"{metrics['rollout/reward']:.4g} in the last step, so policy_gradient has no signal: expected a "
                "reward that differs between completions of a prompt",
            )

    def _watch_replies(self, samples: Sequence[Sample]) -> None:
        with_rollouts = [(sample, self._rollouts[self._plan.source_of(sample.number)]) for sample in samples]
        with_turns = [sample for sample, rollout in with_rollouts if rollout.has_turns]
        self._steps += bool(with_turns)
        self._count += len(with_turns)
        self._cut += sum(sample.completion.finish == "length" for sample in with_turns)
        self._replied += sum(not sample.is_generated_N.all() or sample.tool_calls > 0 for sample in with_turns)
        if self._steps != SILENT_STEPS or self._replied:
            return
        if any(rollout.tool_paths for _, rollout in with_rollouts):
            reason = (
                f"called one of rollout.tools ({self._cut:,} of them are cut at rollout.max_new_tokens): the student "
                "does not write calls in the format of its chat template, or the prompts need none"
            )
        else:
            reason = (
                "had a reply of rollout.environment: the environment is not called after a completion that is cut at "
                f"rollout.max_new_tokens ({self._cut:,} of them) or after the last of rollout.max_turns turns, and "
                "it has returned None in all calls"
            )
        none = f"none of the {self._count:,} completions of the last {SILENT_STEPS} steps has"
        self._warn("replies", f"{none} {reason}")

    def _watch_ratios(self, metrics: Mapping[str, float]) -> None:
        fresh, ratio = metrics.get("rollout/log_ratio_fresh", 0.0), metrics.get("rollout/log_ratio", 0.0)
        if fresh > known_metric("rollout/log_ratio_fresh").warn_above or math.isnan(fresh):
            self._warn(
                "ratio",
                f"the engine's log-probabilities differ by {fresh:.3g} nats on average from those in training, with "
                "the same weights: the engine uses another model, another temperature or another precision"
                f"{self._noise}",
            )
        elif ratio > known_metric("rollout/log_ratio").warn_above or math.isnan(ratio):
            self._warn(
                "stale ratio",  # another name than "ratio", so that the more certain warning can still follow
                f"the engine's log-probabilities, by weights that are at most {metrics['rollout/staleness_max']:.0f} "
                f"steps older, differ by {ratio:.3g} nats on average from those in training: train.learning_rate is "
                "too high, or the engine uses another model, another temperature or another precision"
                f"{self._noise}",
            )

    def _warn(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log_rank0(f"warning: {line}")
