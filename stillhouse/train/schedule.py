"""How many steps, which sequences each of them takes, and at which learning rate: all from the step's number alone.

That is what makes a resumed run the same run: there is no sampler and no scheduler to restore.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stillhouse.config import TrainConfig
from stillhouse.data import PackedSequences

#: the share of the steps in which wsd (warm-up, stable, decay) comes down
WSD_DECAY = 0.2


@dataclass(frozen=True)
class Plan:
    """A training cut into steps of `sequences_per_step` packed sequences, and those into micro-batches of rows."""

    steps: int
    total_sequences: int
    sequences_per_step: int
    rows_per_micro_batch: int

    def micro_batches(self, sequences: PackedSequences, step: int) -> Iterator[np.ndarray]:
        """The sequence numbers of each micro-batch of step `step` (from 0)."""
        chosen = sequences.step_sequences(step, self.sequences_per_step, self.total_sequences)
        for start in range(0, len(chosen), self.rows_per_micro_batch):
            yield chosen[start : start + self.rows_per_micro_batch]


def make_plan(train: TrainConfig, sequences: int, max_tokens: int, parts: int = 1, least: int = 1) -> Plan:
    """The plan for a number of packed sequences of at most `max_tokens` tokens.

    parts: among which each step's micro-batches are dealt out; least: micro-batches that each of them should have,
    for which they are made smaller where there are sequences enough.
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
    """The learning rate of step `step` (from 0) of `steps`: a linear warm-up, then the schedule by name."""
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
