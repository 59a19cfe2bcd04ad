"""`make gpu` on a machine without a GPU: stages start, do their work with tiny sizes, and end."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_first_stage_of_each_kind_passes_on_a_cpu() -> None:
    """The other stages run the same module with other options, and all tests of a GPU are one kind."""
    kinds: dict[str, tuple[int, str]] = {}
    for number, stage in enumerate(gpu.stages("cpu"), start=1):
        kinds.setdefault(stage.arguments[1], (number, stage.name))
    assert len(kinds) > 5
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "20", "--stages"]
    command += [str(number) for number, _ in kinds.values()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = {name for _, name in kinds.values()}
    outcomes = dict(line.rsplit(": ", 1) for line in ended.stdout.splitlines() if line.rpartition(": ")[0] in names)
    assert outcomes.keys() == names
    assert all(outcome.startswith("passed after") for outcome in outcomes.values()), ended.stdout
    assert ended.returncode == 0
    # the parts of a rehearsal did real work
    assert "tokens per second" in ended.stdout
    assert "run_tokens_per_second" in ended.stdout
