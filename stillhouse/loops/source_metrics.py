"""The metrics of a step for each of several sources of prompts.

rollout/math/reward, rollout/math/completion_tokens, rollout/math/truncated
                                         means over the source's completions of the step
rollout/math/reward/exact                the same of a part of a reward that is a weighted sum
rollout/math/completions                 their number
rollout/math/turns, rollout/math/equal_rewards, …
                                         see `sample_statistics.py`
rollout/math/reverse_kl_nats_per_token   a term of the objective: the mean over the source's target tokens, unscaled

D documents of a step: its samples, then documents of the dataset. T rows of a micro-batch.
"""

import statistics
from collections.abc import Sequence

import torch

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import part_names
from stillhouse.engine.engine import StepOutput
from stillhouse.loops.sample_statistics import equal_rewards, turn_statistics
from stillhouse.loops.session import RolloutPlan
from stillhouse.objective.sampled_tokens import origin_masks
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import Ranks, ShardedMicroBatches
from stillhouse.rollout import PromptPlan, Sample
from stillhouse.rollout.reward import mean_and_deviation

#: values per token that are no terms of the objective
_NO_TERMS = ("log_ratio",)
#: the key of the number of target tokens of a source
_TOKENS = "tokens"


def source_metrics(
    ranks: Ranks,
    rollout: RolloutPlan,
    spec: ObjectiveSpec,
    step: int,
    samples: Sequence[Sample],
    micro_batches: ShardedMicroBatches,
    output: StepOutput,
    *,
    one_teacher_per_document: bool,
) -> dict[str, float]:
    """Return the metrics of the sources that have documents in this step. A collective of all processes."""
    plan, metrics = rollout.prompts, dict[str, float]()
    sums = _sums_by_source(ranks, plan, bool(spec.by_origin), step, samples, micro_batches, output)
    for number, settings in enumerate(rollout.sources):
        taken = [sample for sample in samples if _source_of(plan, sample) == number]
        values = _sample_metrics(taken, rollout.configs[number], plan) if taken else {}
        means = _means(spec, sums[number], weighted=not one_teacher_per_document)
        values |= {f"{kind}_nats_per_token": mean for kind, mean in means.items()}
        metrics |= {f"rollout/{settings.shown_name}/{name}": value for name, value in values.items()}
    return metrics


def _source_of(plan: PromptPlan, sample: Sample) -> int:
    return plan.source_of(plan.group_of(sample.number))


def _sample_metrics(samples: Sequence[Sample], rollout: RolloutConfig, plan: PromptPlan) -> dict[str, float]:
    reward_names = part_names(rollout.reward)
    values = {
        "completions": float(len(samples)),
        "completion_tokens": statistics.fmean(sample.generated_tokens for sample in samples),
        "truncated": statistics.fmean(sample.completion.finish == "length" for sample in samples),
    }
    if rewards := [sample.reward for sample in samples if sample.reward is not None]:
        values["reward"], _ = mean_and_deviation(rewards)
        # samples of a checkpoint of an earlier version have no parts
        if all(len(sample.reward_parts) == len(reward_names) for sample in samples):
            parts = zip(*(sample.reward_parts for sample in samples), strict=True)
            values |= {
                f"reward/{name}": mean_and_deviation(results)[0]
                for name, results in zip(reward_names, parts, strict=True)
            }
    return values | turn_statistics(samples, [rollout]) | equal_rewards(samples, plan)


def _sums_by_source(
    ranks: Ranks,
    plan: PromptPlan,
    by_origin: bool,
    step: int,
    samples: Sequence[Sample],
    micro_batches: ShardedMicroBatches,
    output: StepOutput,
) -> list[dict[str, float]]:
    """For each source, the sum of each term's values over its target tokens, and the number of these tokens.

    With an objective by origin, also the number of the target tokens of each origin. Processes that hold copies of a
    row all add it, to the sums and to the numbers.
    """
    source_D = torch.tensor(
        [_source_of(plan, sample) for sample in samples]
        + [plan.source_of_document(document) for document in plan.from_dataset(step)]
    )
    sums = [dict[str, float]() for _ in plan.sources]
    for micro_batch, step_output in zip(micro_batches, output.outputs, strict=False):
        rows = micro_batch.weights_T.nonzero()[:, 0]
        weights_R = micro_batch.weights_T[rows].double().cpu()
        source_R = source_D[micro_batch.document_T[rows].cpu()]
        counted = {_TOKENS: torch.ones_like(weights_R)}
        masks = origin_masks(micro_batch.labels_T, micro_batch.per_token) if by_origin else {}
        counted |= {f"{_TOKENS}/{origin}": mask_T[rows].double().cpu() for origin, mask_T in masks.items()}
        for name, value_T in step_output.per_token.items():
            if name not in _NO_TERMS:
                counted[name] = value_T.detach()[rows].double().cpu() * weights_R
        for name, value_R in counted.items():
            source_sums = torch.bincount(source_R, weights=value_R, minlength=len(sums)).tolist()
            for source, value in zip(sums, source_sums, strict=True):
                source[name] = source.get(name, 0.0) + value
    totals = [dict[str, float]() for _ in plan.sources]
    for rank_sums in ranks.gather(sums):
        for total, source in zip(totals, rank_sums, strict=True):
            for name, value in source.items():
                total[name] = total.get(name, 0.0) + value
    return totals


def _means(spec: ObjectiveSpec, sums: dict[str, float], *, weighted: bool) -> dict[str, float]:
    """Return the means of the terms of one source over its target tokens, of several teachers or origins together.

    As in `step_metrics.means`: with the teachers' weights unless each document has one teacher; a term of some
    origins is a mean over the tokens of these origins.
    """
    averages, tokens = dict[str, float](), dict[str, float]()
    for name, value in sums.items():
        kind, _, label = name.partition("/")
        if kind == _TOKENS:
            continue
        is_weighted = weighted and label in spec.teachers
        averages[kind] = averages.get(kind, 0.0) + value * (spec.teachers[label].weight if is_weighted else 1.0)
        if label in spec.by_origin:
            tokens[kind] = tokens.get(kind, 0.0) + sums[f"{_TOKENS}/{label}"]
        else:
            tokens[kind] = sums[_TOKENS]
    return {kind: value / tokens[kind] for kind, value in averages.items() if tokens[kind]}
