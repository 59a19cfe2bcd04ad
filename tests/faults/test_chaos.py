"""A few trials of the campaign. `make chaos` runs it in full; docs/reliability.md has its results."""

import random
from collections.abc import Sequence
from pathlib import Path

import chaos
import chaos_rollouts
import pytest
from campaign import Campaign, Trial, attempt
from kit.trained_record import TrainedStep, wrong_in


def wrong_outcomes(campaign: Campaign, name: str, faults: Sequence[str], folder: Path) -> list[Trial]:
    """Cause each fault once, and return the trials whose outcome is not right."""
    case = campaign.prepare(name, folder)
    try:
        trials = [
            attempt(case, campaign.faults, fault, folder / f"out-{number}", random.Random(number))
            for number, fault in enumerate(faults)
        ]
    finally:
        case.close()
    return [trial for trial in trials if trial.outcome not in campaign.good]


FAULTS = [fault for fault in chaos.FAULTS if fault != "full disk"]
LAYOUTS = {
    "fsdp 2": ["kill one", "terminate one", "stale file"],
    # each fault under one of these
    **{"tensor 2": FAULTS[::4], "pipeline 2": FAULTS[1::4], "context 2": FAULTS[2::4], "LoRA, fsdp 2": FAULTS[3::4]},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_fault_is_silent(tmp_path: Path, layout: str) -> None:
    assert wrong_outcomes(chaos.CAMPAIGN, layout, LAYOUTS[layout], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    ["one_step_off, reward", "one_step_off, fsdp 2", "async, served, teacher served, fsdp 2"],
)
def test_no_sample_is_lost_or_trained_twice(tmp_path: Path, setting: str) -> None:
    faults = [fault for fault in dict.fromkeys(chaos_rollouts.SETTINGS[setting].faults) if fault != "full disk"]
    assert wrong_outcomes(chaos_rollouts.CAMPAIGN, setting, faults, tmp_path) == []


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
