"""The records of a step's samples: metrics and a few completions."""

import statistics
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import part_names
from stillhouse.data.media import shown_text
from stillhouse.engine.engine import StepOutput
from stillhouse.loops.rollout_warnings import RolloutWarnings
from stillhouse.loops.sample_statistics import equal_rewards, turn_statistics
from stillhouse.loops.session import Data, RolloutPlan
from stillhouse.output import records
from stillhouse.output.metrics import REWARD_PART
from stillhouse.parallel import Ranks, ShardedMicroBatches
from stillhouse.rollout import POLICY_VERSION, PromptPlan, Sample, TargetRules, staleness
from stillhouse.rollout.reward import mean_and_deviation
from stillhouse.user_code.functions import REWARD

#: the prefixes of the keys of per-token values that are not divergences of teacher and student
_NO_DIVERGENCES = ("log_ratio", "cross_entropy", "entropy", "policy_gradient", "sampled_")


class RolloutMetrics:
    """The metrics of the steps since the run was started or resumed, with warnings about their samples.

    rollouts: the section rollout for each source of prompts. noise: see `RolloutWarnings`.
    """

    def __init__(
        self, plan: PromptPlan, ranks: Ranks, rollouts: Sequence[RolloutConfig], noise: Collection[str] = ()
    ):
        self._plan, self._ranks, self._rollouts = plan, ranks, rollouts
        self._by_student = rollouts[0].writer == "student"
        # the parts of different rewards are metrics of the sources
        has_one_reward = len({rollout.reward for rollout in rollouts}) == 1
        self._reward_names = part_names(rollouts[0].reward) if has_one_reward else ()
        self._warnings = RolloutWarnings(plan, rollouts, noise)

    def of(
        self,
        step: int,
        samples: Sequence[Sample],
        micro_batches: ShardedMicroBatches,
        output: StepOutput,
        seconds: float,
        waited: float,
    ) -> dict[str, float]:
        """Return the metrics of a step that took `seconds` seconds, of which the trainer waited `waited` seconds.

        A collective of all processes.
        """
        if not samples:
            return {"rollout/share": 0.0}
        lengths = [sample.generated_tokens for sample in samples]
        metrics = {
            "rollout/completion_tokens": statistics.fmean(lengths),
            "rollout/completion_tokens_min": float(min(lengths)),
            "rollout/completion_tokens_max": float(max(lengths)),
            "rollout/truncated": statistics.fmean(sample.completion.finish == "length" for sample in samples),
            "speed/waiting": waited / seconds,
            "speed/sampled_tokens_per_second": sum(lengths) / seconds,
        }
        if ended := [sample.generated_tokens for sample in samples if sample.completion.finish == "stop"]:
            metrics["rollout/ended_tokens"] = statistics.fmean(ended)
        if rewards := [sample.reward for sample in samples if sample.reward is not None]:
            metrics["rollout/reward"], metrics["rollout/reward_std"] = mean_and_deviation(rewards)
            # samples of a checkpoint of an earlier version have no parts
            if all(len(sample.reward_parts) == len(self._reward_names) for sample in samples):
                for name, *results in zip(
                    self._reward_names, *(sample.reward_parts for sample in samples), strict=True
                ):
                    metrics[f"{REWARD_PART}{name}"], _ = mean_and_deviation(results)
        sample_metrics = turn_statistics(samples, self._rollouts) | equal_rewards(samples, self._plan)
        metrics |= {f"rollout/{name}": value for name, value in sample_metrics.items()}
        metrics["rollout/share"] = len(samples) / (len(samples) + len(self._plan.from_dataset(step)))
        if self._by_student:
            metrics |= self._policy(step, samples, micro_batches, output)
        self._warnings.watch(samples, metrics)
        return metrics

    def call_metrics(self, times: Mapping[str, tuple[int, float]], seconds: float) -> dict[str, float]:
        """Return the mean seconds of a call of a reward's function; empty without such a call.

        times: see `Rollouts.call_times`. seconds: of the step.
        """
        self._warnings.watch_calls(times, seconds)
        count, reward_seconds = times.get(REWARD, (0, 0.0))
        return {"speed/reward_seconds": reward_seconds / count} if count else {}

    def _policy(
        self, step: int, samples: Sequence[Sample], micro_batches: ShardedMicroBatches, output: StepOutput
    ) -> dict[str, float]:
        counts, sums = staleness(samples, step), output.sums
        metrics = {
            "rollout/staleness": sum(steps * count for steps, count in counts.items()) / sum(counts.values()),
            "rollout/staleness_max": float(max(counts)),
        }
        if "log_ratio" in sums:
            metrics |= self._log_ratios(step, micro_batches, output)
            tokens = sums["sampled"] or 1.0
            metrics |= {f"rollout/{name}": sums[name] / tokens for name in ("ratio", "clipped") if name in sums}
        return metrics

    def _log_ratios(self, step: int, micro_batches: ShardedMicroBatches, output: StepOutput) -> dict[str, float]:
        """Return mean and largest difference of log-probabilities, and the mean over tokens of the current weights.

        The second mean is absent if there are no such tokens. A collective of all processes.
        """
        largest, total, count = 0.0, 0.0, 0
        for micro_batch, processed in zip(micro_batches, output.outputs, strict=False):
            ratio_T = processed.per_token["log_ratio"]
            is_fresh_T = (micro_batch.per_token[POLICY_VERSION] == step) & (micro_batch.weights_T > 0)
            largest = float(np.max([largest, *ratio_T.tolist()]))
            total, count = total + float(ratio_T[is_fresh_T].sum()), count + int(is_fresh_T.sum())
        statistics_R3 = np.array(self._ranks.gather([largest, total, count]))
        metrics = {
            "rollout/log_ratio": output.sums["log_ratio"] / (output.sums["sampled"] or 1.0),
            "rollout/log_ratio_max": float(statistics_R3[:, 0].max()),  # NaN stays NaN, unlike with max()
        }
        if statistics_R3[:, 2].sum():
            metrics["rollout/log_ratio_fresh"] = float(statistics_R3[:, 1].sum() / statistics_R3[:, 2].sum())
        return metrics


def shown_samples(
    ranks: Ranks,
    data: Data,
    plan: RolloutPlan,
    step: int,
    samples: Sequence[Sample],
    micro_batches: ShardedMicroBatches,
    output: StepOutput,
) -> list[records.SampleRecord]:
    """Return the samples of a step that samples.jsonl shows (`rollout.samples`). A collective of all processes."""
    most = plan.config.samples
    numbers = shown_numbers(samples, plan.prompts, step, len(samples) if most == "all" else most)
    divergences = _divergences(ranks, numbers, micro_batches, output)
    return [sample_record(data, plan, step, samples[number], divergences[number]) for number in numbers]


def shown_numbers(samples: Sequence[Sample], plan: PromptPlan, step: int, most: int) -> list[int]:
    """Choose at most `most` samples of a step: all samples of some prompts, or the first ones of a single prompt.

    The first prompt is another one in successive steps, so that under async, where a step's prompts are in the order
    of their requests, samples of every staleness are shown. Returns positions in `samples`, in ascending order.
    """
    groups: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        groups.setdefault(plan.group_of(sample.number), []).append(position)
    groups_in_order = list(groups.values())
    first = step % max(1, len(groups_in_order))
    numbers: list[int] = []
    for group in [*groups_in_order[first:], *groups_in_order[:first]]:
        if not numbers or len(numbers) + len(group) <= most:
            numbers += group[:most]
    return sorted(numbers)


def _divergences(
    ranks: Ranks, numbers: list[int], micro_batches: ShardedMicroBatches, output: StepOutput
) -> dict[int, dict[int, float]]:
    """Return {document: {position of a token: sum of the divergences at the row that predicts this token}}.

    numbers: the numbers of the documents in the step, as in `step_documents`.
    """
    rows_here: list[tuple[int, int, float]] = []
    for micro_batch, processed in zip(micro_batches, output.outputs, strict=False):
        per_token = processed.per_token.items()
        divergences = [value_T for name, value_T in per_token if not name.startswith(_NO_DIVERGENCES)]
        if not divergences:
            continue
        documents_T = micro_batch.document_T
        is_shown_T = torch.isin(documents_T, torch.tensor(numbers, device=documents_T.device))
        is_shown_T &= micro_batch.weights_T > 0
        rows = is_shown_T.nonzero()[:, 0]
        documents = documents_T[rows].tolist()
        positions = (micro_batch.position_ids_BS.flatten()[rows] + 1).tolist()
        rows_here += zip(documents, positions, torch.stack(divergences).sum(0)[rows].tolist(), strict=True)
    by_document: dict[int, dict[int, float]] = {number: {} for number in numbers}
    for rows_of_rank in ranks.gather(rows_here):
        for document, position, value in rows_of_rank:
            by_document[document][position] = value
    return by_document


def sample_record(
    data: Data, plan: RolloutPlan, step: int, sample: Sample, divergences: Mapping[int, float] = MappingProxyType({})
) -> records.SampleRecord:
    """Return the record of a sample, as samples.jsonl has it. divergences: by position, see `_divergences`."""
    source = plan.prompts.source_of(plan.prompts.group_of(sample.number))
    completion, tokenizer = sample.completion, data.tokenizer
    prompt_ids = data.train.documents.tokens(sample.prompt)
    by_student = plan.config.writer == "student"
    columns_N = (
        completion.ids_N,
        completion.versions_N,
        sample.is_generated_N,
        TargetRules.of(plan.configs).is_target_N(sample),
    )
    tokens = [
        records.SampleToken(
            text=tokenizer.decode([token]),
            divergence=divergences.get(position),
            version=version if is_generated and by_student else None,
            target=is_target,
        )
        for position, (token, version, is_generated, is_target) in enumerate(
            zip(*(column_N.tolist() for column_N in columns_N), strict=True), start=len(prompt_ids)
        )
    ]
    oldest = int(completion.versions_N[sample.is_generated_N].min())
    return records.SampleRecord(
        step=step + 1,
        prompt=shown_text(tokenizer, prompt_ids, data.media_processor),
        completion=tokenizer.decode(completion.ids_N),
        tokens=tokens,
        length=len(tokens),
        reward=sample.reward,
        reward_parts=dict(zip(part_names(plan.configs[source].reward), sample.reward_parts, strict=False)),
        advantage=None if sample.reward is None else sample.advantage,
        finish=completion.finish,
        source="student" if by_student else "teacher",
        staleness=step - oldest if by_student else 0,
        prompt_source=plan.sources[source].shown_name if plan.sources else None,
    )
