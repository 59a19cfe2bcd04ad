"""The calls of Stillhouse's own functions from the loop of a run down to the objective, for one micro-batch.

    PYTHONPATH=tests python tests/kit/step_walk.py     prints them for one process and for a pipeline of two

`docs/architecture.md` follows the same way in words.
"""

import json
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from kit.ranks import Ranks
from kit.runs import write_run

PIPELINE = {"parallel": {"pipeline": 2}}


def walk(folder: Path, **settings: Any) -> list[str]:
    """Return the functions that are running when the objective of a run's first step is called, the loop first.

    settings: of the run (see `write_run`); it has as many processes as its layout.
    """
    config = write_run(folder, **{"train.steps": 1, "data.eval": 0, "checkpoint.best": None, **settings})
    ranks = Ranks(config.parallel.pipeline, "distill", folder / "run.yaml", hook=record, hook_arguments=(folder,))
    assert not any(ranks.wait()), ranks.texts
    return json.loads((folder / "walk.json").read_text())


def record(folder: Path) -> None:
    """Write the running functions to a file whenever the objective of a training step is called."""
    from stillhouse.engine import loss

    objective = loss.linear_objective

    def recorded(*arguments: Any, **options: Any) -> Any:
        names = running(sys._getframe(1))
        if "train" in names[0]:
            (folder / "walk.json").write_text(json.dumps([*names, objective.__qualname__]))
        return objective(*arguments, **options)

    loss.linear_objective = recorded


def running(frame: FrameType | None) -> list[str]:
    """Return the names of Stillhouse's functions on the stack, from the loop's on."""
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("stillhouse."):
            names.append(frame.f_code.co_qualname)
        if module.startswith("stillhouse.loops.") and frame.f_code.co_name == "train":
            break
        frame = frame.f_back
    return names[::-1]


if __name__ == "__main__":
    for title, settings in (("one process", {}), ("a pipeline of two", PIPELINE)):
        with tempfile.TemporaryDirectory() as folder:
            print(f"{title}: {' → '.join(walk(Path(folder), **settings))}")
