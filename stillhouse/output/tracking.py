"""The trackers of a run: TensorBoard, wandb, and all others that the key `track` names.

A resumed run continues its curves and repeats the steps after its checkpoint. trackers.json records the names and ids
of the run in the trackers, and which steps they already have. Each library is imported only if `track` names it. The
built-in trackers are in `trackers.py`.
"""

import importlib.util
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.config import ConfigError
from stillhouse.libraries import reading
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import parse_metrics
from stillhouse.output.progress import Progress
from stillhouse.output.trackers import TrackedRun, Tracker
from stillhouse.registry import load

FILE = "trackers.json"


class TrackerState(BaseModel):
    """The content of trackers.json. name, id: see `TrackedRun`; a copy of a folder keeps the name of the original.

    active: the trackers to which the lines of metrics.jsonl are being sent.
    sent: for each tracker and metric, the last sent step. Steps that are still in metrics.jsonl can be left out.

    Every other key is the name of a tracker, and its value is the id that this tracker gave to the run.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, str | None] = Field(init=False)

    name: str
    id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], pattern="^[0-9a-f]{12}$")
    active: list[str] = []
    sent: dict[str, dict[str, int]] = {}

    @classmethod
    def open(cls, folder: RunFolder, log_bytes: int) -> Self:
        """Return the state of a run that resumes after `log_bytes` bytes of its metrics.jsonl. No tracker is active.

        Raises ValueError if trackers.json or metrics.jsonl is damaged, or if trackers.json is of another folder.
        """
        path, name = folder.path / FILE, folder.path.resolve().name
        if not path.exists():
            return cls(name=name)
        remedy = f"remove {path} to start new curves in the trackers"
        try:
            state = cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is damaged: {error.errors()[0]['msg'].lower()}; {remedy}") from error
        if state.name != name:
            raise ValueError(f"{path} belongs to the run {state.name}, and this folder is {name}; {remedy}")
        # the last step of each metric in the lines of metrics.jsonl that will be removed
        steps: dict[str, int] = {}
        content = folder.metrics.read_bytes()[log_bytes:] if folder.metrics.is_file() else b""
        for raw in content.split(b"\n")[:-1]:  # without an incomplete last line: a line is sent after it was written
            try:
                line = parse_metrics(raw, "")
            except ValueError as error:
                raise ValueError(f"{folder.metrics} is damaged after byte {log_bytes:,}: {raw[:60]!r}") from error
            steps |= _later(steps, dict.fromkeys(line.values, int(line.step)))
        for name in state.active:
            state.sent[name] = _later(state.sent.get(name, {}), steps)
        state.active = []
        return state


class Trackers:
    """The trackers of a run. warn: a function that prints a warning."""

    def __init__(
        self, folder: RunFolder, trackers: dict[str, Tracker], state: TrackerState, warn: Callable[[str], None]
    ):
        self._folder, self._trackers, self._state, self._warn = folder, trackers, state, warn
        self._logged: dict[str, int] = {}  # for each metric, the last step logged by this process

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the values to each tracker (see `Tracker.in_folder`)."""
        for name, tracker in list(self._trackers.items()):
            sent, new = self._state.sent.get(name, {}), metrics
            if not tracker.in_folder:
                new = {k: v for k, v in metrics.items() if math.isfinite(v) and step > sent.get(k, -1)}
            if new or tracker.in_folder:
                self._use(name, f"at step {step}", partial(tracker.log, step, new))
        self._logged |= dict.fromkeys(metrics, step)

    def close(self, *, complete: bool) -> None:
        """End the trackers' runs. complete: whether the run ended without an error or a signal."""
        for name, tracker in list(self._trackers.items()):
            self._use(name, "at the end", partial(tracker.close, complete=complete))

    def _use(self, name: str, when: str, call: Callable[[], None]) -> None:
        tracker = self._trackers[name]
        if tracker.in_folder:
            return call()
        try:
            with reading(name, library=tracker.library):
                call()
        except ValueError as error:
            cause = error.__cause__
            del self._trackers[name]
            self._state.active.remove(name)
            self._state.sent[name] = _later(self._state.sent.get(name, {}), self._logged)
            self._folder.write_text(FILE, self._state.model_dump_json(indent=1))
            self._warn(
                f"warning: track: {name} failed {when} ({type(cause).__name__}: {cause}) and gets no more metrics; "
                "metrics.jsonl has all metrics"
            )


def require_trackers(track: Sequence[str]) -> None:
    """Raise ConfigError if the library of a tracker in `track` is not installed."""
    for name in track:
        library = load("stillhouse.trackers", name).library
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:  # without an origin, it is only a folder with this name
            raise ConfigError("track", f"{library} is not installed; pip install 'stillhouse[{name}]'")


def open_trackers(
    folder: RunFolder,
    track: Sequence[str],
    progress: Progress,
    values: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Trackers:
    """Open the trackers. Call this before lines are removed from metrics.jsonl.

    progress: the progress at which the run resumes. values: the configuration by dotted keys.
    Raises ValueError if a tracker cannot be started or used, or if trackers.json is damaged or another run's.
    """
    kinds = {name: load("stillhouse.trackers", name) for name in dict.fromkeys(track)}
    for name, kind in kinds.items():
        for attribute in ("library", "in_folder", "log", "close"):
            if not hasattr(kind, attribute):
                raise ValueError(f"track: {name} is {kind}, which has no `{attribute}`: expected a `Tracker` class")
    sending = [name for name, kind in kinds.items() if not kind.in_folder]
    keeps_state = bool(sending)
    path = folder.path / FILE
    if not keeps_state and path.exists():
        with suppress(ValidationError):  # a damaged file counts as another run's, which is not continued
            keeps_state = TrackerState.model_validate_json(path.read_bytes()).name == folder.path.resolve().name
    state = TrackerState.open(folder, progress.log_bytes) if keeps_state else TrackerState(name=folder.path.name)
    own_ids, trackers = state.__pydantic_extra__, dict[str, Tracker]()
    try:
        with ExitStack() as opened:
            for name, kind in kinds.items():
                run = TrackedRun(folder.path, state.name, state.id, values, progress.step, own_ids.get(name))
                try:
                    trackers[name] = kind(run)
                finally:
                    own_ids |= {name: run.own_id} if run.own_id else {}
                opened.callback(trackers[name].close, complete=False)
            opened.pop_all()
        state.active = sending
    finally:
        if keeps_state:
            # also after a failed start of a tracker, so that the next process continues the runs in other trackers
            folder.write_text(FILE, state.model_dump_json(indent=1))
    return Trackers(folder, trackers, state, warn)


def _later(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: max(a.get(key, -1), b.get(key, -1)) for key in a | b}
