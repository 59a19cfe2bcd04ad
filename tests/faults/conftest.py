"""Complete runs on two ranks with all their checkpoints, of which tests damage copies."""

from pathlib import Path

import pytest
from kit import slow
from kit.ranks import run_ranks
from kit.runs import write_run


@pytest.fixture(scope="session", params=["fsdp", slow("tensor"), slow("pipeline")])
def run_on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a complete run on two ranks, and the override of its layout."""
    folder, override = tmp_path_factory.mktemp(request.param), f"parallel.{request.param}=2"
    write_run(folder, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    run_ranks(2, "distill", folder / "run.yaml", override)
    return folder, override
