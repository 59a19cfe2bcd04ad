"""A few trials of the campaign. `make chaos` runs it in full; docs/proofs.md has its results."""

import random
from collections.abc import Sequence
from pathlib import Path

import chaos
import chaos_rollouts
import pytest
from campaign import Campaign, Trial, attempt
from kit.signal_hooks import TrainedStep, wrong_in


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


#: each fault occurs at least once; the other layouts take longest to start again
LAYOUTS = {
    "fsdp 2": ["kill one", "terminate one", "stale file"],
    "pipeline 2": ["kill all", "stop one", "terminate all", "flip a byte", "replaced model"],
    "LoRA, fsdp 2": ["delete a file", "cut a file"],
    "Megatron-Core, fsdp 2": ["kill one", "stale file"],
}
#: the faults of on-policy runs; all samples of the last one come from servers
SETTINGS = {
    "one_step_off, reward, workers": [
        *("hanging function", "exiting function", "failing function", "killed workers"),
        *("stopped workers", "terminate"),
    ],
    "one_step_off, fsdp 2": ["kill"],
    "async, served, teacher served, fsdp 2": [
        *("kill", "stop and continue", "half open", "hostile answers", "damaged weights")
    ],
}


def test_each_fault_occurs_in_a_trial() -> None:
    """A small disk is the fault of `test_disk.py`."""
    for tried, campaign in ((LAYOUTS, chaos.FAULTS), (SETTINGS, chaos_rollouts.FAULTS)):
        assert {fault for faults in tried.values() for fault in faults} | {"full disk"} == {*campaign}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_fault_is_silent(tmp_path: Path, layout: str) -> None:
    if "Megatron-Core" in layout:
        pytest.importorskip("megatron.core")
    assert wrong_outcomes(chaos.CAMPAIGN, layout, LAYOUTS[layout], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_sample_is_lost_or_trained_twice(tmp_path: Path, setting: str) -> None:
    assert wrong_outcomes(chaos_rollouts.CAMPAIGN, setting, SETTINGS[setting], tmp_path) == []


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
    steps = [TrainedStep(step, *samples) for step, samples in enumerate(zip(numbers, versions, strict=True))]
    assert wrong_in(steps, count=2, samples=4, max_staleness=1) == message
