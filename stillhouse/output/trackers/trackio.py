"""Trackio. It reads its own environment variables, such as TRACKIO_DIR. This module reads TRACKIO_PROJECT."""

import os
from collections.abc import Mapping
from typing import Any

from stillhouse.libraries import imported, reading
from stillhouse.output.folder import RunFolder
from stillhouse.output.trackers.tracker_state import TrackerState


class TrackioRun:
    def __init__(self, run: Any):
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, complete: bool) -> None:  # trackio does not distinguish failed runs
        self._run.finish()


def open_trackio(folder: RunFolder, state: TrackerState, values: Mapping[str, Any]) -> TrackioRun:
    """Start a run, or continue the run of the same name: trackio identifies runs by name, so the name has the id."""
    trackio = imported("trackio", "track")
    with reading("track: trackio cannot start a run", library="trackio"):
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "stillhouse"),
            name=f"{state.name}-{state.id}",
            config=dict(values),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
        )
    return TrackioRun(run)
