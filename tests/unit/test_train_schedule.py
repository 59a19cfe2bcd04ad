"""Steps, micro-batches and learning rates; they depend only on a step's number."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.runs import session_of

from stillhouse.config import TrainConfig
from stillhouse.engine.schedule import StepSchedule, learning_rate, make_step_schedule

PEAK = 2.0


def rates(steps: int, schedule: str, warmup: float = 0.0, floor: float = 0.0) -> list[float]:
    train = TrainConfig(learning_rate=PEAK, schedule=schedule, warmup=warmup, min_learning_rate=floor)
    return [learning_rate(train, steps, step) / PEAK for step in range(steps)]


#: the rates of five steps without warm-up, and the last one of twenty steps with a warm-up of five
SHAPES = {
    "constant": ([1, 1, 1, 1, 1], 1.0),
    "linear": ([1, 0.8, 0.6, 0.4, 0.2], 1 / 15),
    "cosine": ([0.5 + 0.5 * math.cos(math.pi * step / 5) for step in range(5)], 0.5 - 0.5 * math.cos(math.pi / 15)),
    "wsd": ([1, 1, 1, 1, 1], 1 / 3),
}


@pytest.mark.parametrize("schedule", SHAPES)
def test_a_schedule(schedule: str) -> None:
    """It begins at the peak or with a linear warm-up to it, a run of one step is at the peak, and no rate is zero."""
    shape, last = SHAPES[schedule]
    assert rates(5, schedule) == pytest.approx(shape)
    for warmup in (0.25, 5.0):  # a share, and steps
        warmed_up = rates(20, schedule, warmup)
        assert warmed_up[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
        assert warmed_up[-1] == pytest.approx(last)
    for warmup in (0.0, 0.5, 1.0, 100.0):
        assert rates(1, schedule, warmup) == [1.0]
    assert min(rates(997, schedule, warmup=0.03)) > 0


def test_the_length_of_a_warm_up_and_of_a_decay() -> None:
    assert rates(20, "wsd") == pytest.approx([1.0] * 17 + [0.75, 0.5, 0.25])
    assert rates(20, "wsd", floor=0.2)[-1] == pytest.approx(0.2 + 0.8 * 0.25)
    assert rates(4, "cosine", warmup=100) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert 0.07 * 100 > 7
    assert rates(100, "constant", warmup=0.07)[6] == 1.0


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_floor_is_a_share_of_the_peak(schedule: str) -> None:
    falling = rates(1000, schedule, floor=0.1)
    assert (falling[0], falling[-1]) == pytest.approx((1.0, 0.1), abs=1e-3)
    assert min(falling) > 0.1


@pytest.mark.parametrize(
    ("settings", "sequences", "expected"),
    [
        *(({"epochs": 1}, 17, StepSchedule(5, 17, 4, 2)), ({"epochs": 2}, 17, StepSchedule(9, 34, 4, 2))),
        *(({"epochs": 0.5}, 16, StepSchedule(2, 8, 4, 2)), ({"epochs": 0.001}, 17, StepSchedule(1, 1, 4, 2))),
        *(({"steps": 3}, 17, StepSchedule(3, 12, 4, 2)), ({"steps": 100}, 1, StepSchedule(100, 400, 4, 2))),
    ],
)
def test_the_step_schedule(settings: dict[str, Any], sequences: int, expected: StepSchedule) -> None:
    train = TrainConfig(tokens_per_step=4 * 32 + 31, micro_batch_tokens=2 * 32 + 31, **settings)
    assert make_step_schedule(train, sequences, 32) == expected


def test_each_token_is_seen_once_per_epoch(tmp_path: Path) -> None:
    session = session_of(tmp_path, **{"train.epochs": 2, "train.steps": None})
    sequences, step_schedule = session.data.train, session.schedule.step_schedule
    assert len(sequences) % step_schedule.sequences_per_step != 0
    micro_batches = [step_schedule.micro_batches(sequences, step) for step in range(step_schedule.steps)]
    steps = [batch.rows for batch in micro_batches]
    seen = np.concatenate([rows for step in steps for rows in step])
    assert np.bincount(seen).tolist() == [2] * len(sequences)
    assert sorted(seen[: len(sequences)]) == list(range(len(sequences)))
    assert seen[: len(sequences)].tolist() != seen[len(sequences) :].tolist()
    sizes = [sum(len(rows) for rows in step) for step in steps]
    assert sizes == [4] * (step_schedule.steps - 1) + [2 * len(sequences) - 4 * (step_schedule.steps - 1)]
    assert 0 < sizes[-1] < 4
    assert all(len(rows) <= 2 for step in steps for rows in step)
    targets = [sum(micro_batch.valid_tokens for micro_batch in step) for step in micro_batches]
    assert sum(targets) == 2 * sequences.documents.report.target_tokens
    assert [step.normalizer for step in micro_batches] == targets
    assert sum(step.tokens for step in micro_batches) == 2 * len(sequences.documents.tokens_N)
    assert all(step.shapes_BS == [batch.shape_BS for batch in step] for step in micro_batches)
    with pytest.raises(ValueError, match=f"step {step_schedule.steps} "):
        step_schedule.micro_batches(sequences, step_schedule.steps)
