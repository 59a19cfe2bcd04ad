"""A few trials of the campaign. `make chaos` runs it in full; docs/reliability.md has its results."""

import random
from pathlib import Path

import chaos
import chaos_rollouts
import pytest
from kit.trained_record import TrainedStep, wrong_in


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        pytest.param("fsdp 2", [chaos.kill_one, chaos.terminate_one, chaos.stale_file], marks=pytest.mark.slow),
        *(
            pytest.param(layout, [*chaos.DURING[:-1], *chaos.AFTER], marks=pytest.mark.slow)
            for layout in ("tensor 2", "pipeline 2", "context 2", "LoRA, fsdp 2")
        ),
    ],
)
def test_no_fault_is_silent(tmp_path: Path, layout: str, faults: list[chaos.Fault]) -> None:
    case = chaos.prepare(layout, tmp_path)
    trials = [
        chaos.attempt(case, fault, tmp_path / f"out-{number}", random.Random(number))
        for number, fault in enumerate(faults)
    ]
    assert [trial for trial in trials if trial.outcome not in chaos.GOOD] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["one_step_off, reward", "sync, served", "one_step_off, fsdp 2", "async, served, teacher served, fsdp 2"],
)
def test_no_sample_is_lost_or_trained_twice(tmp_path: Path, setting: str) -> None:
    case = chaos_rollouts.prepare(setting, tmp_path)
    faults = [chaos_rollouts.kill, chaos_rollouts.terminate, chaos_rollouts.stop_and_continue]
    faults += [fault for fault in chaos_rollouts.faults_of(case.setting) if fault not in chaos_rollouts.FAULTS]
    try:
        trials = [
            chaos_rollouts.attempt(case, fault, tmp_path / f"out-{number}", random.Random(number))
            for number, fault in enumerate(faults)
        ]
    finally:
        case.close()
    assert [trial for trial in trials if trial.outcome not in chaos_rollouts.GOOD] == []


@pytest.mark.parametrize(
    ("numbers", "versions", "message"),
    [
        ([[0, 1], [2, 3]], [(0, 0), (0, 1)], ""),
        ([[0, 1], [1, 3]], [(0, 0), (0, 1)], "samples [1] were trained more than once"),
        ([[0, 1], [2, 4]], [(0, 0), (0, 1)], "samples [3, 4] were not trained, or are none of this run"),
        ([[0, 1], [2, 3]], [(0, 0), (0, 2)], "step 1 has tokens of versions 0 to 2; the bound is 1"),
        ([[0, 1], [2, 3]], [(0, 0), (-1, 1)], "step 1 has tokens of versions -1 to 1; the bound is 1"),
        ([[0, 1]], [(0, 0)], "steps [0], expected 0 to 1"),
    ],
)
def test_the_record_of_trained_samples_says_what_is_wrong(
    numbers: list[list[int]], versions: list[tuple[int, int]], message: str
) -> None:
    steps = [
        TrainedStep(step, *step_samples) for step, step_samples in enumerate(zip(numbers, versions, strict=True))
    ]
    assert wrong_in(steps, count=2, samples=4, max_staleness=1) == message
