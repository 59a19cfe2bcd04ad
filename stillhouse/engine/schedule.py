"""Computes the number of steps, and the sequences and the learning rate of each step.

Only the configuration, the data and the step's number determine them, so a resumed run needs no saved state of a
sampler or a scheduler.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stillhouse.config import RolloutConfig, TrainConfig
from stillhouse.data import PackedMicroBatches, PackedSequences
from stillhouse.rollout import PromptPlan, PromptSource

#: with the schedule wsd (warm-up, stable, decay), the rate decays in this last share of the steps after the warm-up
WSD_DECAY = 0.2


@dataclass(frozen=True)
class StepSchedule:
    """The division of the training data into steps of packed sequences, and of each step into micro-batches."""

    steps: int
    total_sequences: int
    sequences_per_step: int
    rows_per_micro_batch: int

    def micro_batches(self, sequences: PackedSequences, step: int) -> PackedMicroBatches:
        """Return the micro-batches of step `step` (from 0)."""
        chosen = sequences.step_sequences(step, self.sequences_per_step, self.total_sequences)
        starts = range(0, len(chosen), self.rows_per_micro_batch)
        return sequences.micro_batches([chosen[start : start + self.rows_per_micro_batch] for start in starts])


def make_step_schedule(
    train: TrainConfig, sequences: int, max_tokens: int, data_ranks: int = 1, stages: int = 1
) -> StepSchedule:
    """Return the step schedule. sequences: the number of packed sequences, each of at most `max_tokens` tokens.

    A micro-batch has at most `train.micro_batch_tokens` tokens, but at least one sequence. It is smaller if a data
    rank would otherwise get fewer micro-batches per step than the pipeline has stages.
    """
    per_step = max(1, train.tokens_per_step // max_tokens)
    rows = min(max(1, train.micro_batch_tokens // max_tokens), max(1, per_step // (data_ranks * stages)))
    if train.steps is not None:
        total = train.steps * per_step
    else:
        assert train.epochs is not None
        total = max(1, round(train.epochs * sequences))
    return StepSchedule(math.ceil(total / per_step), total, per_step, rows)


def micro_batch_capacity(train: TrainConfig, max_tokens: int, data_ranks: int = 1, stages: int = 1) -> int:
    """Return the maximum number of tokens of a micro-batch that consists of one packed sequence. It is at least
    `max_tokens`, and otherwise small enough that a data rank gets a micro-batch per step for each pipeline stage.
    """
    return max(max_tokens, min(train.micro_batch_tokens, train.tokens_per_step // (data_ranks * stages)))


def make_on_policy_schedule(
    train: TrainConfig, rollout: RolloutConfig, sources: Sequence[PromptSource], max_tokens: int, seed: int
) -> tuple[StepSchedule, PromptPlan]:
    """Return the step schedule and the prompt plan. In the schedule, a sequence is one sampled completion.
    `StepPacker` forms the micro-batches. In an epoch, completions are generated for as many prompts as the sources
    have in total.
    """
    weights = sum(source.weight for source in sources)
    samples = round(sum(source.weight * source.samples_per_prompt for source in sources) / weights, 6)
    share = sum(source.weight * source.share for source in sources) / weights
    per_step = rollout.prompts_per_step or max(1, int(train.tokens_per_step // (max_tokens * samples)))
    if train.steps is not None:
        steps = train.steps
    else:
        assert train.epochs is not None
        prompts = sum(source.prompts for source in sources)
        steps = math.ceil(round(max(1.0, train.epochs * prompts) / (per_step * share), 6))
    completions = round(per_step * samples)
    return StepSchedule(steps, steps * completions, completions, 1), PromptPlan(sources, per_step, seed)


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`: a linear warm-up, then `train.schedule`."""
    warmup = train.warmup * steps if train.warmup < 1 else train.warmup
    warmup = min(math.ceil(round(warmup, 6)), steps - 1)  # 0.07 of 100 steps is 7, not 7.000000000000001
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)  # 0 at the peak; the step after the last one would have 1
    heights = {  # between the minimum (0) and the peak (1)
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "wsd": min(1.0, (1.0 - progress) / WSD_DECAY),
    }
    floor = train.min_learning_rate
    return train.learning_rate * (floor + (1 - floor) * heights[train.schedule])
