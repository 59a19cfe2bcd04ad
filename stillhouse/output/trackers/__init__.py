"""Trackers that get the metrics of a run in addition to metrics.jsonl: TensorBoard, wandb, trackio and mlflow.

A resumed run continues its curves and repeats the steps after its checkpoint. `TrackerState` records which steps each
tracker already has. If a tracker fails during the run, a warning is printed once and the run continues without this
tracker, because metrics.jsonl has all metrics. Each library is imported only if `track` names it.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

from stillhouse.config import ConfigError
from stillhouse.libraries import reading
from stillhouse.objective.terms import require_attribute
from stillhouse.output.folder import RunFolder
from stillhouse.output.trackers.mlflow import open_mlflow
from stillhouse.output.trackers.tracker_state import TrackerState
from stillhouse.output.trackers.trackio import open_trackio
from stillhouse.output.trackers.wandb import open_wandb

Values = Mapping[str, Any]


class Tracker(Protocol):
    """A run in one tracker. Its methods may raise any exception of the library."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, complete: bool) -> None: ...


#: for each name in `track`, a function (run folder, state, configuration by dotted keys) → tracker
OPENERS: dict[str, Callable[[RunFolder, TrackerState, Values], Tracker]] = {
    "wandb": open_wandb,
    "trackio": open_trackio,
    "mlflow": open_mlflow,
}


def require_trackers(track: Sequence[str]) -> None:
    """Raise ConfigError if a tracker in `track` is not installed."""
    for name in track:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: only a folder of this name, for example wandb's
            raise ConfigError("track", f"{name} is not installed; pip install 'stillhouse[{name}]'")


class Trackers:
    """The trackers of a run, except TensorBoard. warn: prints a warning."""

    def __init__(
        self, folder: RunFolder, trackers: dict[str, Tracker], state: TrackerState, warn: Callable[[str], None]
    ):
        self._folder, self._trackers, self._state, self._warn = folder, trackers, state, warn
        self._logged: dict[str, int] = {}  # for each metric, the last step logged by this process

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite values to each tracker, except values that an earlier process has already sent."""
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        for name, tracker in list(self._trackers.items()):
            sent = self._state.sent.get(name, {})
            if new := {key: value for key, value in finite.items() if step > sent.get(key, -1)}:
                self._use(name, f"at step {step}", partial(tracker.log, step, new))
        self._logged |= dict.fromkeys(metrics, step)

    def close(self, *, complete: bool) -> None:
        """End the trackers' runs. complete: whether the run ended without an error or a signal."""
        for name, tracker in list(self._trackers.items()):
            self._use(name, "at the end", partial(tracker.close, complete=complete))

    def _use(self, name: str, when: str, call: Callable[[], None]) -> None:
        try:
            with reading(name, library=name):
                call()
        except ValueError as error:
            cause = error.__cause__
            del self._trackers[name]
            self._state.lost(name, self._logged)
            self._state.save(self._folder)
            self._warn(
                f"warning: track: {name} failed {when} ({type(cause).__name__}: {cause}) and gets nothing more; "
                "metrics.jsonl has everything"
            )


def open_trackers(
    folder: RunFolder, track: Sequence[str], log_bytes: int, values: Values, warn: Callable[[str], None]
) -> Trackers:
    """Open the trackers. Call this before lines are removed from metrics.jsonl.

    log_bytes: the length of metrics.jsonl at the checkpoint from which the run resumes.
    values: the configuration by dotted keys.

    Raises ValueError if a tracker cannot be started or used, or if trackers.json is damaged or of another run.
    """
    names = [name for name in dict.fromkeys(track) if name in OPENERS]
    if not names and not TrackerState.is_own(folder):
        return Trackers(folder, {}, TrackerState(name=""), warn)
    state, trackers = TrackerState.open(folder, log_bytes), dict[str, Tracker]()
    try:
        with ExitStack() as opened:
            for name in names:
                trackers[name] = OPENERS[name](folder, state, values)
                for method in ("log", "close"):
                    expected = "the methods log(step, metrics) and close(*, complete)"
                    require_attribute(f"track: {name}", trackers[name], method, expected)
                opened.callback(trackers[name].close, complete=False)
            opened.pop_all()
        state.active = names
    finally:
        state.save(folder)  # also if a tracker fails to start, so that the next process continues the other runs
    return Trackers(folder, trackers, state, warn)
