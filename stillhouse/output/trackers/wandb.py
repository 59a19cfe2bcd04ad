"""Weights & Biases. It reads its own environment variables, such as WANDB_MODE, WANDB_PROJECT and WANDB_DIR."""

import os
from collections.abc import Mapping

from stillhouse.libraries import imported, reading
from stillhouse.output.trackers import TrackedRun, Tracker

#: the longest time that a run waits at its end until all data are sent; `wandb sync` can send the rest later
SECONDS = 120.0


class Wandb(Tracker):
    library = "wandb"

    def __init__(self, run: TrackedRun):
        wandb = imported("wandb", "track")
        hint = "log in with `wandb login`, or set WANDB_MODE=offline"
        with reading(f"track: wandb cannot start a run; {hint}", library="wandb"):
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "stillhouse"),
                name=os.environ.get("WANDB_NAME", run.name),
                id=run.id,
                # offline, wandb cannot look up the run, so a later process only reuses the id
                resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
                dir=os.environ.get("WANDB_DIR", str(run.folder)),
                config=dict(run.values),
                settings=wandb.Settings(
                    console=os.environ.get("WANDB_CONSOLE", "off"),
                    # by default wandb waits for ever if a server does not answer, and the model would not be written
                    finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT", SECONDS)),
                    finish_timeout_raises=True,
                ),
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)
