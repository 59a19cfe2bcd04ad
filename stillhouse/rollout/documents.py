"""Makes a step's documents from its samples and from the dataset, and packs these documents into micro-batches.

The document of a sample keeps the columns and the teachers' prefixes of its prompt. Dimension: N tokens of a
completion, or of all documents of the step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from stillhouse.config import RolloutConfig, sampling_temperatures
from stillhouse.data import DataReport, Documents, PackedMicroBatches, PackedSequences
from stillhouse.data.offsets import offsets_of
from stillhouse.objective.metrics import ADVANTAGES, IS_SAMPLED, OLD_LOG_PROBS, POLICY_VERSION, SAMPLING
from stillhouse.parallel import DistributedStudent, ShardedMicroBatches
from stillhouse.rollout.records import Sample


@dataclass(frozen=True)
class TargetRules:
    """The rules for targets and their weights in a sample.

    mask_truncated: whether completions that were cut at max_new_tokens have no targets.
    position_decay: token n of a completion (from 0) has the weight position_decay ** n.
    by_student: whether the student generated the samples; otherwise a teacher did.
    temperature_numbers: for each source of prompts, the number of its sampling temperature (see `SAMPLING`); empty
        if all are equal.
    """

    mask_truncated: bool = False
    position_decay: float = 1.0
    by_student: bool = True
    temperature_numbers: Sequence[int] = ()

    @classmethod
    def of(cls, rollouts: Sequence[RolloutConfig]) -> Self:
        """The rules of a run. rollouts: the section rollout for each source of prompts."""
        rollout, temperatures = rollouts[0], sampling_temperatures(rollouts)
        numbers = [temperatures.index(source.temperature) for source in rollouts]
        return cls(
            mask_truncated=rollout.truncated == "mask",
            position_decay=rollout.position_decay,
            by_student=rollout.writer == "student",
            temperature_numbers=numbers if len(temperatures) > 1 else (),
        )

    def is_target_N(self, sample: Sample) -> np.ndarray:
        """For each token of the completion, whether the student is trained on it, [N] bool."""
        is_masked = self.mask_truncated and sample.completion.finish == "length"
        return sample.is_generated_N & (not is_masked)


def step_documents(
    prompts: Documents,
    samples: Sequence[Sample],
    rules: TargetRules,
    dataset: Documents | None = None,
    from_dataset: Sequence[int] = (),
) -> Documents:
    """Return the documents of a step: its samples, and its documents of the dataset. At least one is needed.

    from_dataset: the numbers of the step's documents in `dataset`. These documents keep all targets. Target n of a
        document (from 0) has the weight position_decay ** n.
    """
    parts = [_sample_documents(prompts, samples, rules)] if samples else []
    if len(from_dataset):
        assert dataset is not None
        documents = dataset.select(from_dataset)
        weights: list[np.ndarray] = []
        for number in range(len(documents)):
            targets = documents.targets(number)
            place_N = np.cumsum(targets) - 1
            weights.append(_position_weights(int(targets.sum()) or 1, rules)[np.maximum(place_N, 0)])
        zeros_N = np.zeros(len(documents.tokens_N), dtype=np.float32)
        per_token = {ADVANTAGES: zeros_N, OLD_LOG_PROBS: zeros_N, IS_SAMPLED: zeros_N, POLICY_VERSION: zeros_N - 1}
        per_token |= {SAMPLING: zeros_N} if rules.temperature_numbers else {}
        parts.append(replace(documents, per_token=per_token, weights_N=np.concatenate(weights)))
    return parts[0] if len(parts) == 1 else Documents.concatenated(parts, DataReport("a step's rollouts"))


def _sample_documents(prompts: Documents, samples: Sequence[Sample], rules: TargetRules) -> Documents:
    selected = prompts.select([sample.prompt for sample in samples])
    prompt_ids = np.split(selected.tokens_N, selected.offsets[1:-1])

    def column_N(value: float, completion_values: Callable[[Sample], np.ndarray]) -> np.ndarray:
        """Values of all tokens, float32: `value` for each token of a prompt, `completion_values` for completions."""
        parts = [
            np.concatenate([np.full(len(ids_N), value), completion_values(sample)])
            for ids_N, sample in zip(prompt_ids, samples, strict=True)
        ]
        return np.concatenate(parts).astype(np.float32)

    completion_ids = [sample.completion.ids_N for sample in samples]
    ids = [np.concatenate(pair) for pair in zip(prompt_ids, completion_ids, strict=True)]
    lengths = [len(ids_N) for ids_N in ids]
    per_token = {
        ADVANTAGES: column_N(0, lambda sample: np.full(len(sample.completion.ids_N), sample.advantage)),
        OLD_LOG_PROBS: column_N(0, lambda sample: sample.completion.log_probs_N),
        IS_SAMPLED: np.full(sum(lengths), float(rules.by_student), np.float32),
        # tokens of an environment also have the version −1
        POLICY_VERSION: column_N(-1, lambda sample: sample.completion.versions_N),
    }
    if rules.temperature_numbers:
        assert selected.set_D is not None
        numbers_D = np.array(rules.temperature_numbers, dtype=np.float32)[selected.set_D]
        per_token[SAMPLING] = np.repeat(numbers_D, lengths)
    sources = [f"{source} (sample {one.number})" for source, one in zip(selected.sources, samples, strict=True)]
    return replace(
        selected,
        tokens_N=np.concatenate(ids).astype(np.int32),
        targets_N=column_N(0, rules.is_target_N) > 0,
        offsets=offsets_of(lengths),
        sources=sources,
        per_token=per_token,
        weights_N=column_N(0, lambda sample: _position_weights(len(sample.completion.ids_N), rules)),
    )


def _position_weights(count: int, rules: TargetRules) -> np.ndarray:
    """The weights of the targets of a completion, [count] float32. No weight is 0, so that the loss's normaliser,
    which counts non-zero weights, does not depend on the decay.
    """
    weights_N = np.power(rules.position_decay, np.arange(count, dtype=np.float64))
    return np.maximum(weights_N, np.finfo(np.float32).tiny).astype(np.float32)


@dataclass(frozen=True)
class StepPacker:
    """Packs the documents of a step into micro-batches.

    prompts: the packed prompts, whose settings are also used for the documents. A packed sequence has at most
        `prompts.max_tokens` tokens, or `micro_batch_tokens` if `by_length`.
    micro_batch_tokens: the maximum number of tokens of a micro-batch.
    by_length: whether a micro-batch is one sequence of documents of similar lengths (see `PackedSequences`).
    """

    prompts: PackedSequences
    micro_batch_tokens: int
    by_length: bool = False

    def sharded(
        self, student: DistributedStudent, documents: Documents, *, training: bool = True
    ) -> ShardedMicroBatches:
        """This process's part of the micro-batches of some documents."""
        layout = student.layout
        packed = self.micro_batches(documents, layout.degrees.data * layout.stages)
        return student.shard(packed, training=training)

    def micro_batches(self, documents: Documents, parts: int = 1) -> PackedMicroBatches:
        """The micro-batches of some documents.

        parts: the minimum number of micro-batches, if there are at least as many documents. Without this minimum,
            some processes could get no micro-batch, because completions are often far shorter than `data.max_tokens`.
        """
        gaps = self.prompts.gaps
        widths_D = documents.widths(gaps, np.arange(len(documents)))
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
