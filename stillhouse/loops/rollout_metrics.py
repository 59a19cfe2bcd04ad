"""The metrics of a step's samples, and warnings of a policy that runs away."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from stillhouse.engine.engine import StepOutput
from stillhouse.generation import POLICY_VERSION, RolloutPlan, Sample, staleness
from stillhouse.generation.advantages import mean_and_deviation
from stillhouse.output.rollout_log import Timeline
from stillhouse.parallel import Ranks, ShardedMicroBatches, log_rank0

#: mean difference of log-probabilities in nats, above which the engine's and the trainer's computations disagree: of
#: tokens that were written by the present weights, and of those by earlier ones, which training has changed since
MOST_LOG_RATIO, MOST_STALE_LOG_RATIO = 0.1, 1.0
#: completions that are so many times longer than those of the first steps, and so often cut, have no end in sight
LONGER, OFTEN_CUT, FIRST_STEPS = 2.0, 0.5, 5
#: or so many more of them are cut
MORE_CUT = 0.3


class RolloutMetrics:
    """Of the steps since the run was started or resumed.

    by_student: whether the student writes the completions
    """

    def __init__(self, plan: RolloutPlan, ranks: Ranks, *, by_student: bool):
        self._plan, self._ranks, self._by_student = plan, ranks, by_student
        self._first: list[tuple[float, float]] = []  # mean length, and share of cut completions
        self._warned: set[str] = set()

    def of(
        self,
        step: int,
        samples: Sequence[Sample],
        micro_batches: ShardedMicroBatches,
        output: StepOutput,
        timeline: Timeline,
        seconds: float,
    ) -> dict[str, float]:
        """The metrics of a step, which has taken so many seconds. A collective of all processes."""
        if not samples:
            return {"rollout/share": 0.0}
        lengths = [len(sample.completion.ids_N) for sample in samples]
        metrics = {
            "rollout/completion_tokens": statistics.fmean(lengths),
            "rollout/truncated": statistics.fmean(sample.completion.finish == "length" for sample in samples),
        }
        metrics["speed/waiting"] = timeline.waiting(step + 1)
        metrics["speed/sampled_tokens_per_second"] = sum(lengths) / seconds
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        if rewards:
            metrics["rollout/reward"], metrics["rollout/reward_std"] = mean_and_deviation(rewards)
        metrics["rollout/share"] = len(samples) / (len(samples) + len(self._plan.from_dataset(step)))
        if self._by_student:
            metrics |= self._policy(step, samples, micro_batches, output)
        self._watch(metrics)
        return metrics

    def _policy(
        self, step: int, samples: Sequence[Sample], micro_batches: ShardedMicroBatches, output: StepOutput
    ) -> dict[str, float]:
        counts = staleness(samples, step)
        tokens = sum(counts.values())
        metrics = {
            "rollout/staleness": sum(steps * count for steps, count in counts.items()) / tokens,
            "rollout/staleness_max": float(max(counts)),
        }
        if "log_ratio" in output.sums:
            metrics |= self._log_ratios(step, micro_batches, output)
            for name in ("ratio", "clipped"):
                if name in output.sums:
                    metrics[f"rollout/{name}"] = output.sums[name] / (output.sums["sampled"] or 1.0)
        return metrics

    def _log_ratios(self, step: int, micro_batches: ShardedMicroBatches, output: StepOutput) -> dict[str, float]:
        """The mean and the largest difference of log-probabilities, and the mean of the tokens that were written by
        the weights that learn from them, if there are any. A collective of all processes.
        """
        largest, total, count = 0.0, 0.0, 0
        for micro_batch, of_micro_batch in zip(micro_batches, output.outputs, strict=False):
            ratio_T = of_micro_batch.per_token["log_ratio"]
            is_fresh_T = (micro_batch.per_token[POLICY_VERSION] == step) & (micro_batch.weights_T > 0)
            largest = float(np.max([largest, *ratio_T.tolist()]))
            total, count = total + float(ratio_T[is_fresh_T].sum()), count + int(is_fresh_T.sum())
        statistics_R3 = np.array(self._ranks.gather([largest, total, count]))
        metrics = {
            "rollout/log_ratio": output.sums["log_ratio"] / (output.sums["sampled"] or 1.0),
            "rollout/log_ratio_max": float(statistics_R3[:, 0].max()),  # a NaN stays one, unlike with max()
        }
        if statistics_R3[:, 2].sum():
            metrics["rollout/log_ratio_fresh"] = float(statistics_R3[:, 1].sum() / statistics_R3[:, 2].sum())
        return metrics

    def _watch(self, metrics: dict[str, float]) -> None:
        length = metrics["rollout/completion_tokens"]
        cut = metrics["rollout/truncated"]
        if len(self._first) < FIRST_STEPS:
            self._first.append((length, cut))
        usual, usually_cut = (statistics.fmean(values) for values in zip(*self._first, strict=True))
        if cut > OFTEN_CUT and (length > LONGER * usual or cut > usually_cut + MORE_CUT):
            self._warn(
                "length",
                f"completions have {length:.0f} tokens on average, {usual:.0f} in the first steps, and "
                f"{cut:.0%} of them are cut at rollout.max_new_tokens: the student does "
                "not stop any more. rollout.truncated=mask keeps it from learning from cut completions",
            )
        fresh, ratio = metrics.get("rollout/log_ratio_fresh", 0.0), metrics.get("rollout/log_ratio", 0.0)
        if fresh > MOST_LOG_RATIO or math.isnan(fresh):
            self._warn(
                "ratio",
                f"the engine's log-probabilities differ by {fresh:.3g} nats on average from those in training, with "
                "the same weights: it computes another model, another temperature or in another precision",
            )
        elif ratio > MOST_STALE_LOG_RATIO or math.isnan(ratio):
            self._warn(
                "stale ratio",  # it must not hide the warning above, which is surer, in a later step
                f"the engine's log-probabilities, by weights that are at most {metrics['rollout/staleness_max']:.0f} "
                f"steps older, differ by {ratio:.3g} nats on average from those in training: train.learning_rate is "
                "too high, or the engine computes another model, another temperature or in another precision",
            )

    def _warn(self, what: str, line: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log_rank0(f"warning: {line}")
