"""A few trials of the campaign. `make chaos` runs it in full; docs/reliability.md has its results."""

import random
from pathlib import Path

import chaos
import pytest


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
