"""The number of steps, and the sequences and the learning rate of each step, which follow from its number alone.

So a resumed run continues exactly as before: there is no state of a sampler or a scheduler to restore.
"""

import math
from dataclasses import dataclass

from stillhouse.config import TrainConfig
from stillhouse.data import PackedMicroBatches, PackedSequences

#: the share of the steps after the warm-up in which the schedule wsd (warm-up, stable, decay) decays
WSD_DECAY = 0.2


@dataclass(frozen=True)
class Plan:
    """How training is cut into steps of `sequences_per_step` packed sequences, and each step into micro-batches."""

    steps: int
    total_sequences: int
    sequences_per_step: int
    rows_per_micro_batch: int

    def micro_batches(self, sequences: PackedSequences, step: int) -> PackedMicroBatches:
        """The micro-batches of step `step` (from 0)."""
        chosen = sequences.step_sequences(step, self.sequences_per_step, self.total_sequences)
        starts = range(0, len(chosen), self.rows_per_micro_batch)
        return sequences.micro_batches([chosen[start : start + self.rows_per_micro_batch] for start in starts])


def make_plan(train: TrainConfig, sequences: int, max_tokens: int, parts: int = 1, least: int = 1) -> Plan:
    """The plan for a number of packed sequences of at most `max_tokens` tokens.

    parts: the number of data ranks, over which each step's micro-batches are distributed. least: the smallest number
    of micro-batches that each of them should get, which is the number of pipeline stages. If a step has enough
    sequences for that, micro-batches are made smaller where needed.
    """
    per_step = max(1, train.tokens_per_step // max_tokens)
    rows = min(max(1, train.micro_batch_tokens // max_tokens), max(1, per_step // (parts * least)))
    if train.steps is not None:
        total = train.steps * per_step
    else:
        assert train.epochs is not None
        total = max(1, round(train.epochs * sequences))
    return Plan(math.ceil(total / per_step), total, per_step, rows)


def learning_rate(train: TrainConfig, steps: int, step: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: a linear warm-up, then `train.schedule`."""
    warmup = train.warmup * steps if train.warmup < 1 else train.warmup
    warmup = min(math.ceil(round(warmup, 6)), steps - 1)  # 0.07 of 100 steps is 7, not 7.000000000000001
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)  # 0 at the peak; 1 would be the step after the last
    floor = train.min_learning_rate
    return train.learning_rate * (floor + (1 - floor) * _height(train.schedule, progress))


def _height(schedule: str, progress: float) -> float:
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "wsd":
            return min(1.0, (1.0 - progress) / WSD_DECAY)
    raise AssertionError(schedule)
