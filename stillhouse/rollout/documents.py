"""Makes documents from a step's samples. They are packed into micro-batches like all documents.

A step's documents are the generated samples, followed by completions from the dataset. A sample keeps the columns and
the teachers' prefixes of its prompt, so that teachers get the same inputs as in off-policy training.

N tokens of all documents of the step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stillhouse.config import RolloutConfig, sampling_temperatures
from stillhouse.data import DataReport, Documents, PackedMicroBatches, PackedSequences
from stillhouse.data.offsets import offsets_of
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS, POLICY_VERSION, SAMPLING
from stillhouse.rollout.records import Sample


@dataclass(frozen=True)
class TargetRules:
    """The rules for targets and their weights in a sample.

    mask_truncated: whether completions that were cut at max_new_tokens have no targets.
    position_decay: token n of a completion (from 0) has the weight position_decay ** n.
    by_student: whether the student generated the samples; otherwise a teacher did.
    temperature_numbers: for each source of prompts, the number of its sampling temperature (see `SAMPLING`). If all
        are equal, the documents have no such number.
    """

    mask_truncated: bool = False
    position_decay: float = 1.0
    by_student: bool = True
    temperature_numbers: Sequence[int] = ()

    @classmethod
    def of(cls, rollouts: Sequence[RolloutConfig]) -> Self:
        """rollouts: the section rollout for each source of prompts."""
        rollout, temperatures = rollouts[0], sampling_temperatures(rollouts)
        return cls(
            mask_truncated=rollout.truncated == "mask",
            position_decay=rollout.position_decay,
            by_student=rollout.writer == "student",
            temperature_numbers=[temperatures.index(source.temperature) for source in rollouts],
        )

    @property
    def has_several_temperatures(self) -> bool:
        return len(set(self.temperature_numbers)) > 1

    def is_target_N(self, sample: Sample) -> np.ndarray:
        """Whether the student is trained on a token of the completion, [N] bool."""
        is_masked = self.mask_truncated and sample.completion.finish == "length"
        return sample.is_generated_N & (not is_masked)


def step_documents(
    prompts: Documents,
    samples: Sequence[Sample],
    rules: TargetRules,
    dataset: Documents | None = None,
    from_dataset: Sequence[int] = (),
) -> Documents:
    """The documents of a step. from_dataset: the numbers of the step's documents in `dataset`.

    At least one sample or document is needed. All targets of the dataset's documents are kept. The weight of such a
    target depends on its position among the targets of its document.
    """
    parts = [_sample_documents(prompts, samples, rules)] if samples else []
    if len(from_dataset):
        assert dataset is not None
        parts.append(_dataset_documents(dataset.select(from_dataset), rules))
    return parts[0] if len(parts) == 1 else Documents.concatenated(parts, DataReport("a step's rollouts"))


def _sample_documents(prompts: Documents, samples: Sequence[Sample], rules: TargetRules) -> Documents:
    prompts_of_samples = prompts.select([sample.prompt for sample in samples])
    prompt_ids = np.split(prompts_of_samples.tokens_N, prompts_of_samples.offsets[1:-1])
    columns = [_columns(len(ids_N), sample, rules) for ids_N, sample in zip(prompt_ids, samples, strict=True)]
    targets_N, weights_N, advantages_N, log_probs_N, versions_N = map(np.concatenate, zip(*columns, strict=True))
    completion_ids = [sample.completion.ids_N for sample in samples]
    ids = [np.concatenate(pair) for pair in zip(prompt_ids, completion_ids, strict=True)]
    numbers = dict[str, np.ndarray]()
    if rules.has_several_temperatures:
        assert prompts_of_samples.set_D is not None
        numbers_D = np.array(rules.temperature_numbers, dtype=np.float32)[prompts_of_samples.set_D]
        numbers[SAMPLING] = np.repeat(numbers_D, [len(ids_N) for ids_N in ids])
    return replace(
        prompts_of_samples,
        tokens_N=np.concatenate(ids).astype(np.int32),
        targets_N=targets_N > 0,
        offsets=offsets_of([len(ids_N) for ids_N in ids]),
        sources=[
            f"{source} (sample {sample.number})"
            for source, sample in zip(prompts_of_samples.sources, samples, strict=True)
        ],
        per_token={
            ADVANTAGES: advantages_N,
            OLD_LOG_PROBS: log_probs_N,
            IS_SAMPLED: np.full(len(targets_N), float(rules.by_student), np.float32),
            POLICY_VERSION: versions_N,
            **numbers,
        },
        weights_N=weights_N,
    )


def _columns(prompt_tokens: int, sample: Sample, rules: TargetRules) -> list[np.ndarray]:
    """Targets, weights, advantages, log-probabilities and versions of a sample's tokens, float32."""
    completion, is_generated_N = sample.completion, sample.is_generated_N
    count = len(completion.ids_N)
    columns = (
        (0, rules.is_target_N(sample)),
        (0, _position_weights(count, rules)),
        (0, np.full(count, sample.advantage)),
        (0, completion.log_probs_N),
        (-1, np.where(is_generated_N, completion.versions_N, -1)),
    )
    return [np.concatenate([np.full(prompt_tokens, value), column]).astype(np.float32) for value, column in columns]


def _dataset_documents(documents: Documents, rules: TargetRules) -> Documents:
    weights = []
    for number in range(len(documents)):
        targets = documents.targets(number)
        place_N = np.cumsum(targets) - 1  # the position among the document's targets
        weights.append(_position_weights(int(targets.sum()) or 1, rules)[np.maximum(place_N, 0)])
    weights_N = np.concatenate(weights)
    zeros_N = np.zeros(len(documents.tokens_N), dtype=np.float32)
    per_token = {ADVANTAGES: zeros_N, OLD_LOG_PROBS: zeros_N, IS_SAMPLED: zeros_N, POLICY_VERSION: zeros_N - 1}
    per_token |= {SAMPLING: zeros_N} if rules.has_several_temperatures else {}
    return replace(documents, per_token=per_token, weights_N=weights_N)


def _position_weights(count: int, rules: TargetRules) -> np.ndarray:
    """The weights of the targets of a completion, [count] float32.

    No weight is 0, so that the loss's normaliser, which counts non-zero weights, does not depend on the decay.
    """
    weights_N = np.power(rules.position_decay, np.arange(count, dtype=np.float64))
    return np.maximum(weights_N, np.finfo(np.float32).tiny).astype(np.float32)


@dataclass(frozen=True)
class StepPacker:
    """Packs documents that begin with prompts. A packed sequence has at most `prompts.max_tokens` tokens.

    micro_batch_tokens: the maximum number of tokens of a micro-batch.
    by_length: whether a micro-batch is one sequence of documents of similar lengths (see `PackedSequences`).
    """

    prompts: PackedSequences
    micro_batch_tokens: int
    by_length: bool = False

    def micro_batches(self, documents: Documents, parts: int = 1) -> PackedMicroBatches:
        """The micro-batches of some documents.

        parts: the minimum number of micro-batches, if there are as many documents. Completions are often far shorter
            than `data.max_tokens`. With sequences of this length, some processes would have no micro-batch.
        """
        gaps = self.prompts.gaps
        widths_D = documents.lengths_D + documents.gaps_D(gaps)
        most_tokens = self.micro_batch_tokens if self.by_length else self.prompts.max_tokens
        capacity = min(most_tokens, max(int(widths_D.max()), math.ceil(widths_D.sum() / parts)))
        packed = PackedSequences(
            documents,
            max_tokens=capacity,
            seed=0,
            shuffle=False,
            gaps=gaps,
            together=self.prompts.together,
            by_length=self.by_length,
            media_inputs=self.prompts.media_inputs,
        )
        most = 1 if self.by_length else self.micro_batch_tokens // capacity
        rows = max(1, min(most, len(packed) // parts))
        numbers = np.arange(len(packed))
        return packed.micro_batches([numbers[start : start + rows] for start in range(0, len(packed), rows)])
