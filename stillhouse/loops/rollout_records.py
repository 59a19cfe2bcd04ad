"""The records of a step's samples: metrics of all samples and of each source of prompts, and a few completions.

rollout/math/reward, …                   as rollout/reward, over the samples of the source "math"
rollout/math/completions                 the number of samples of this source
rollout/math/reverse_kl_nats_per_token   a term of the objective: the mean over the source's target tokens, unscaled

Dimensions: D documents of a step (its samples, then documents of the dataset), T rows of a micro-batch.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import part_names
from stillhouse.data.media import shown_text
from stillhouse.engine.engine import StepOutput, add_up
from stillhouse.loops.rollout_warnings import RolloutWarnings
from stillhouse.loops.session import Data, RolloutPlan
from stillhouse.objective.metrics import POLICY_VERSION
from stillhouse.objective.sampled_tokens import origin_masks
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.output.records import SampleRecord, SampleToken
from stillhouse.parallel import Ranks, ShardedMicroBatches
from stillhouse.rollout import PromptPlan, Sample, TargetRules, staleness
from stillhouse.rollout.reward import mean_and_deviation, rewards_are_equal
from stillhouse.user_code.functions import REWARD

#: the prefixes of the keys of per-token values that are not divergences of teacher and student
_NO_DIVERGENCES = ("log_ratio", "cross_entropy", "entropy", "policy_gradient", "sampled_")
#: the names of per-token values that are not terms of the objective
_NO_TERMS = ("log_ratio",)
#: the key of the number of target tokens of a source
_TOKENS = "tokens"


@dataclass(frozen=True)
class SampledStep:
    """A step on samples. number: the step's number, from 0. micro_batches, output: the parts of this process."""

    number: int
    samples: Sequence[Sample]
    micro_batches: ShardedMicroBatches
    output: StepOutput


class RolloutMetrics:
    """The metrics of the steps since the run was started or resumed, with warnings about their samples.

    one_teacher_per_document: whether the run has several teachers and each document belongs to one of them.
    noise: see `RolloutWarnings`.
    """

    def __init__(
        self,
        rollout: RolloutPlan,
        ranks: Ranks,
        spec: ObjectiveSpec,
        *,
        one_teacher_per_document: bool = False,
        noise: Collection[str] = (),
    ):
        self._rollout, self._plan, self._ranks, self._spec = rollout, rollout.prompts, ranks, spec
        self._one_teacher_per_document = one_teacher_per_document
        self._warnings = RolloutWarnings(rollout.prompts, rollout.configs, noise)

    def of(
        self, step: SampledStep, seconds: float, waited: float, times: Mapping[str, tuple[int, float]]
    ) -> dict[str, float]:
        """Return the metrics of a step. A collective of all processes.

        seconds: the time of the step.
        waited: the part of this time during which the trainer waited for completions.
        times: see `FunctionCalls.take_times`; empty except on rank 0.
        """
        metrics, samples, sources = {"rollout/share": 0.0}, step.samples, self._rollout.sources
        if samples:
            lengths = [sample.generated_tokens for sample in samples]
            values = sample_metrics(samples, self._rollout.configs, self._plan)
            metrics = {f"rollout/{name}": value for name, value in values.items()} | {
                "rollout/completion_tokens_min": float(min(lengths)),
                "rollout/completion_tokens_max": float(max(lengths)),
                "rollout/share": len(samples) / (len(samples) + len(self._plan.from_dataset(step.number))),
                "speed/waiting": waited / seconds,
                "speed/sampled_tokens_per_second": sum(lengths) / seconds,
            }
            if ended := [sample.generated_tokens for sample in samples if sample.completion.finish == "stop"]:
                metrics["rollout/ended_tokens"] = statistics.fmean(ended)
            if self._rollout.config.writer == "student":
                metrics |= self._policy(step)
            self._warnings.watch(samples, metrics)
        self._warnings.watch_calls(times, seconds)
        count, reward_seconds = times.get(REWARD, (0, 0.0))
        metrics |= {"speed/reward_seconds": reward_seconds / count} if count else {}
        for number, sums in enumerate(self._sums_by_source(step)) if sources else ():
            taken = [sample for sample in samples if self._plan.source_of(sample.number) == number]
            values = sample_metrics(taken, [self._rollout.configs[number]], self._plan) if taken else {}
            values |= {"completions": float(len(taken))} if taken else {}
            values.pop("reward_std", None)
            values |= {f"{kind}_nats_per_token": mean for kind, mean in self._source_means(sums).items()}
            metrics |= {f"rollout/{sources[number].shown_name}/{name}": value for name, value in values.items()}
        return metrics

    def _policy(self, step: SampledStep) -> dict[str, float]:
        """The staleness, the ratios, and the mean and maximum of |log-probability in training − at sampling|.

        `log_ratio_fresh` is the mean over tokens that the current weights generated, and absent if there are no such
        tokens. A collective of all processes.
        """
        counts, sums = staleness(step.samples, step.number), step.output.sums
        metrics = {
            "rollout/staleness": sum(steps * count for steps, count in counts.items()) / sum(counts.values()),
            "rollout/staleness_max": float(max(counts)),
        }
        if "log_ratio" not in sums:
            return metrics
        largest, total, count = 0.0, 0.0, 0
        for micro_batch, processed in zip(step.micro_batches, step.output.outputs, strict=False):
            ratio_T = processed.per_token["log_ratio"]
            is_fresh_T = (micro_batch.per_token[POLICY_VERSION] == step.number) & (micro_batch.weights_T > 0)
            largest = float(np.max([largest, *ratio_T.tolist()]))
            total, count = total + float(ratio_T[is_fresh_T].sum()), count + int(is_fresh_T.sum())
        statistics_R3 = np.array(self._ranks.gather([largest, total, count]))
        tokens = sums["sampled"] or 1.0
        metrics["rollout/log_ratio"] = sums["log_ratio"] / tokens
        metrics["rollout/log_ratio_max"] = float(statistics_R3[:, 0].max())  # max() of Python may drop a NaN
        if statistics_R3[:, 2].sum():
            metrics["rollout/log_ratio_fresh"] = float(statistics_R3[:, 1].sum() / statistics_R3[:, 2].sum())
        return metrics | {f"rollout/{name}": sums[name] / tokens for name in ("ratio", "clipped") if name in sums}

    def _sums_by_source(self, step: SampledStep) -> list[dict[str, float]]:
        """For each source, the sum of each term over the source's target tokens, and the number of these tokens.

        With an objective by origin, there are also sums for each origin. A row that several processes have is added
        several times, both to the values and to the number of tokens. A collective.
        """
        plan = self._plan
        source_D = torch.tensor(
            [plan.source_of(sample.number) for sample in step.samples]
            + [plan.source_of_document(document) for document in plan.from_dataset(step.number)]
        )
        sums = [dict[str, float]() for _ in plan.sources]
        for micro_batch, processed in zip(step.micro_batches, step.output.outputs, strict=False):
            rows = micro_batch.weights_T.nonzero()[:, 0]
            weights_R = micro_batch.weights_T[rows].double().cpu()
            source_R = source_D[micro_batch.document_T[rows].cpu()]
            counted = {_TOKENS: torch.ones_like(weights_R)}
            masks = origin_masks(micro_batch.labels_T, micro_batch.per_token) if self._spec.by_origin else {}
            counted |= {f"{_TOKENS}/{origin}": mask_T[rows].double().cpu() for origin, mask_T in masks.items()}
            for name, value_T in processed.per_token.items():
                if name not in _NO_TERMS:
                    counted[name] = value_T.detach()[rows].double().cpu() * weights_R
            for name, value_R in counted.items():
                source_sums = torch.bincount(source_R, weights=value_R, minlength=len(sums)).tolist()
                for source, value in zip(sums, source_sums, strict=True):
                    source[name] = source.get(name, 0.0) + value
        return [add_up(source_sums) for source_sums in zip(*self._ranks.gather(sums), strict=True)]

    def _source_means(self, sums: dict[str, float]) -> dict[str, float]:
        """The means of the terms of one source over its target tokens, for all teachers and origins together.

        As in `step_metrics.means`, the mean over teachers has the teachers' weights, unless each document has one
        teacher. A term of some origins is a mean over the tokens of these origins.
        """
        teachers = {} if self._one_teacher_per_document else self._spec.teachers
        averages, tokens = dict[str, float](), dict[str, float]()
        for name, value in sums.items():
            kind, _, label = name.partition("/")
            if kind == _TOKENS:
                continue
            weight = teachers[label].weight if label in teachers else 1.0
            averages[kind] = averages.get(kind, 0.0) + value * weight
            if label in self._spec.by_origin:
                tokens[kind] = tokens.get(kind, 0.0) + sums[f"{_TOKENS}/{label}"]
            else:
                tokens[kind] = sums[_TOKENS]
        return {kind: value / tokens[kind] for kind, value in averages.items() if tokens[kind]}


def shown_samples(ranks: Ranks, data: Data, plan: RolloutPlan, step: SampledStep) -> list[SampleRecord]:
    """Return the samples of a step that samples.jsonl shows (`rollout.samples`). A collective of all processes."""
    most = len(step.samples) if plan.config.samples == "all" else plan.config.samples
    numbers = shown_numbers(step.samples, plan.prompts, step.number, most)
    rows_here: list[tuple[int, int, float]] = []
    for micro_batch, processed in zip(step.micro_batches, step.output.outputs, strict=False):
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
    # for each document, the sum of the divergences by the position of the predicted token
    by_document: dict[int, dict[int, float]] = {number: {} for number in numbers}
    for rows_of_rank in ranks.gather(rows_here):
        for document, position, value in rows_of_rank:
            by_document[document][position] = value
    return [sample_record(data, plan, step.number, step.samples[number], by_document[number]) for number in numbers]


def shown_numbers(samples: Sequence[Sample], plan: PromptPlan, step: int, most: int) -> list[int]:
    """Choose at most `most` samples of a step, and return their positions.

    These are all samples of some prompts, or the first samples of a single prompt. Successive steps begin with
    different prompts, so that samples of every staleness are shown under async.
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


def sample_record(
    data: Data, plan: RolloutPlan, step: int, sample: Sample, divergences: Mapping[int, float] = MappingProxyType({})
) -> SampleRecord:
    """The record of a sample in samples.jsonl. divergences: the sum of the divergences for each position of a token
    in the document.
    """
    source = plan.prompts.source_of(sample.number)
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
        SampleToken(
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
    return SampleRecord(
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


def sample_metrics(
    samples: Sequence[Sample], rollouts: Sequence[RolloutConfig], plan: PromptPlan
) -> dict[str, float]:
    """Return the means of the lengths, ends, rewards, turns and calls of samples. The means of the parts of rewards
    are absent if the sources have different rewards.

    rollouts: the sections rollout of the samples' sources.
    """
    values = {
        "completion_tokens": statistics.fmean(sample.generated_tokens for sample in samples),
        "truncated": statistics.fmean(sample.completion.finish == "length" for sample in samples),
    }
    if rewards := [sample.reward for sample in samples if sample.reward is not None]:
        values["reward"], values["reward_std"] = mean_and_deviation(rewards)
        names = part_names(rollouts[0].reward) if len({rollout.reward for rollout in rollouts}) == 1 else []
        # samples in a checkpoint of an earlier version of Stillhouse have no parts
        if all(len(sample.reward_parts) == len(names) for sample in samples):
            for name, *results in zip(names, *(sample.reward_parts for sample in samples), strict=True):
                values[f"reward/{name}"], _ = mean_and_deviation(results)
    return values | turn_statistics(samples, rollouts) | equal_rewards(samples, plan)


def turn_statistics(samples: Sequence[Sample], rollouts: Sequence[RolloutConfig]) -> dict[str, float]:
    """Return `turns` and `tool_calls` per sample, and `tool_errors` per call, if the samples can have turns and
    calls. rollouts: the sections rollout of the samples' sources.
    """
    if not any(rollout.has_turns for rollout in rollouts):
        return {}
    values = {"turns": statistics.fmean(sample.turns for sample in samples)}
    if any(rollout.tool_paths for rollout in rollouts):
        calls = sum(sample.tool_calls for sample in samples)
        values["tool_calls"] = calls / len(samples)
        if calls:
            values["tool_errors"] = sum(sample.tool_errors for sample in samples) / calls
    return values


def equal_rewards(samples: Sequence[Sample], plan: PromptPlan) -> dict[str, float]:
    """Return `equal_rewards`: the share of prompts whose rewards are all equal; empty for samples without rewards."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(plan.group_of(sample.number), []).append(sample.reward)
    if not rewards:
        return {}
    return {"equal_rewards": statistics.fmean(map(rewards_are_equal, rewards.values()))}
