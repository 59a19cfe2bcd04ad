"""Trackio. It reads its own environment variables, such as TRACKIO_DIR. This module reads TRACKIO_PROJECT."""

import os
from collections.abc import Mapping

from stillhouse.libraries import imported, reading
from stillhouse.output.trackers import TrackedRun, Tracker


class Trackio(Tracker):
    library = "trackio"

    def __init__(self, run: TrackedRun):
        trackio = imported("trackio", "track")
        with reading("track: trackio cannot start a run", library="trackio"):
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "stillhouse"),
                name=f"{run.name}-{run.id}",  # trackio identifies runs by name, so the name has the id
                config=dict(run.values),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, complete: bool) -> None:  # trackio does not distinguish failed runs
        self._run.finish()
