"""The interface of trackers, which get the metrics of a run in addition to metrics.jsonl, and this project's own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol


@dataclass
class TrackedRun:
    """A run as its trackers know it.

    name: the name of the run's folder. id: distinguishes runs whose folders have the same name.
    values: the configuration by dotted keys.
    step: the step from which the run resumes; 0 for a new run.
    own_id: the run's id in this tracker, which the tracker sets if it has one. A resumed run gets it again.
    """

    folder: Path
    name: str
    id: str
    values: Mapping[str, Any]
    step: int = 0
    own_id: str | None = None


class Tracker(Protocol):
    """A run in one tracker, which an entry of the group `stillhouse.trackers` refers to.

    library: the module that must be installed. The tracker's own module imports it only when a run is opened.
    in_folder: whether the tracker writes files of the run's folder only. It then gets all values of repeated steps
        again, and an error ends the run. All other trackers get each finite value of a step once; if one fails, a
        warning is printed and the run continues without it.
    """

    library: ClassVar[str]
    in_folder: ClassVar[bool] = False

    def __init__(self, run: TrackedRun):
        """Start the run or continue it. Raises ValueError if that fails."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, *, complete: bool) -> None:
        """complete: whether the run ended without an error or a signal."""
