"""Complete runs with all their checkpoints, of which tests damage copies."""

from pathlib import Path

import pytest
from kit import slow
from kit.ranks import Ranks
from kit.runs import run, write_run

LAYOUTS = ["fsdp", *(slow(layout) for layout in ("tensor", "pipeline"))]


@pytest.fixture(scope="session")
def complete_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run in one process with all its checkpoints."""
    folder = tmp_path_factory.mktemp("complete")
    write_run(folder, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    run("distill", folder / "run.yaml")
    return folder


@pytest.fixture(scope="session", params=LAYOUTS)
def run_on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The same run on two ranks."""
    folder, override = tmp_path_factory.mktemp(request.param), f"parallel.{request.param}=2"
    write_run(folder, **{"checkpoint.every": 2, "checkpoint.keep": 9})
    assert Ranks(2, "distill", folder / "run.yaml", override).wait() == [0, 0]
    return folder, override
