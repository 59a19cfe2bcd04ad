"""Trackio. Its own environment variables apply, such as TRACKIO_DIR. TRACKIO_PROJECT is read here."""

import importlib
import os
import sqlite3
from collections.abc import Mapping
from typing import Any

from stillhouse.train.folder import RunFolder
from stillhouse.train.trackers.state import TrackerState


class TrackioRun:
    errors: tuple[type[Exception], ...] = (OSError, sqlite3.Error, ValueError)

    def __init__(self, run: Any):
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackio(folder: RunFolder, state: TrackerState, values: Mapping[str, Any]) -> TrackioRun:
    """Start the run, or continue the run of the same name: trackio knows runs by their names, so the id is in it."""
    trackio: Any = importlib.import_module("trackio")
    try:
        run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "stillhouse"),
            name=f"{state.name}-{state.id}",
            config=dict(values),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
        )
    except TrackioRun.errors as error:
        raise ValueError(f"track: trackio cannot start a run ({error})") from error
    return TrackioRun(run)
