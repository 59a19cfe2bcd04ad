"""Trackers that get the metrics of a run in addition to metrics.jsonl: TensorBoard, wandb, trackio and mlflow.

A run that is resumed continues its curves. It makes the steps after its checkpoint again, and `TrackerState` knows
which of them a tracker has already. If a tracker fails during the run, a warning is printed once and the run goes on
without it, because metrics.jsonl has everything. Each library is imported only if `track` names it.
"""

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stillhouse.config import ConfigError
from stillhouse.train.folder import RunFolder
from stillhouse.train.trackers.mlflow import open_mlflow
from stillhouse.train.trackers.state import TrackerState
from stillhouse.train.trackers.trackio import open_trackio
from stillhouse.train.trackers.wandb import open_wandb

Values = Mapping[str, Any]


class Tracker(Protocol):
    """One tracker's run. errors: what its library raises if it cannot be reached or cannot write."""

    errors: tuple[type[Exception], ...]

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


#: (the run's folder, what is known of the tracker's run, the configuration by dotted keys) → the tracker
OPENERS: dict[str, Callable[[RunFolder, TrackerState, Values], Tracker]] = {
    "wandb": open_wandb,
    "trackio": open_trackio,
    "mlflow": open_mlflow,
}


def require_trackers(track: Sequence[str]) -> None:
    """Raise ConfigError if a tracker in `track` is not installed."""
    for name in track:
        if importlib.util.find_spec(name) is None:
            raise ConfigError("track", f"{name} is not installed; pip install 'stillhouse[{name}]'")


@dataclass
class Trackers:
    """The trackers of a run, except for TensorBoard; `warn` prints a line."""

    trackers: dict[str, Tracker]
    state: TrackerState
    warn: Callable[[str], None]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite values, except those that an earlier process has sent."""
        if not self.trackers:
            return
        new = {key: value for key, value in metrics.items() if math.isfinite(value)}
        new = {key: value for key, value in new.items() if step > self.state.sent.get(key, -1)}
        if new:
            self._each(f"at step {step}", lambda tracker: tracker.log(step, new))

    def close(self) -> None:
        self._each("at the end", lambda tracker: tracker.close())

    def _each(self, when: str, use: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                use(tracker)
            except tracker.errors as error:
                del self.trackers[name]
                self.warn(
                    f"warning: track: {name} failed {when} ({type(error).__name__}: {error}) and gets nothing more; "
                    "metrics.jsonl has everything"
                )


def open_trackers(
    folder: RunFolder, track: Sequence[str], log_bytes: int, values: Values, warn: Callable[[str], None]
) -> Trackers:
    """Open the trackers before lines of metrics.jsonl are removed.

    log_bytes: the length of metrics.jsonl at the checkpoint that the run continues from. values: the configuration.
    Raises ValueError if a tracker cannot be started, or if trackers.json is damaged or of another run.
    """
    names = [name for name in dict.fromkeys(track) if name in OPENERS]
    if not names:
        return Trackers({}, TrackerState(name=""), warn)
    state = TrackerState.open(folder, log_bytes)
    trackers = {}
    for name in names:
        trackers[name] = OPENERS[name](folder, state, values)
    state.save(folder)
    return Trackers(trackers, state, warn)
