"""Complete runs on two ranks with all their checkpoints, of which tests damage copies."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from kit import slow
from kit.ranks import Ranks
from kit.runs import write_run

LAYOUTS = ["fsdp", *(slow(layout) for layout in ("tensor", "pipeline"))]


@pytest.fixture(scope="session")
def runs_on_two(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, str]]:
    """A function that returns the same run on two ranks, by the layout's axis. It makes each run once."""

    @cache
    def run_under(axis: str) -> tuple[Path, str]:
        folder, override = tmp_path_factory.mktemp(axis), f"parallel.{axis}=2"
        write_run(folder, **{"checkpoint.every": 2, "checkpoint.keep": 9})
        assert Ranks(2, "distill", folder / "run.yaml", override).wait() == [0, 0]
        return folder, override

    return run_under


@pytest.fixture(params=LAYOUTS)
def run_on_two(request: pytest.FixtureRequest, runs_on_two: Callable[[str], tuple[Path, str]]) -> tuple[Path, str]:
    """The folder of a complete run on two ranks, and the override of its layout."""
    return runs_on_two(request.param)
