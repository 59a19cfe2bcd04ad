"""`make gpu` on a machine without a GPU: every stage starts, does its work with tiny sizes, and ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_stage_passes_on_a_cpu() -> None:
    names = [stage.name for stage in gpu.stages("cpu")]
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "20"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    outcomes = dict(line.rsplit(": ", 1) for line in ended.stdout.splitlines() if line.rpartition(": ")[0] in names)
    assert outcomes.keys() == set(names)
    assert all(outcome.startswith("passed after") for outcome in outcomes.values()), ended.stdout
    assert ended.returncode == 0
    # the parts of a rehearsal did real work
    assert "tokens per second" in ended.stdout
    assert "run_tokens_per_second" in ended.stdout
