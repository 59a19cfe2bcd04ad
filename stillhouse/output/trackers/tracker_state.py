"""trackers.json: by which names the trackers know a run, and which steps they have already."""

import uuid
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.output.folder import RunFolder
from stillhouse.output.metrics_file import parse_metrics

FILE = "trackers.json"


class TrackerState(BaseModel):
    """name: the name of the run's folder, so that a copy of the folder does not write into the original's curves.
    id: distinguishes runs whose folders have the same name.
    mlflow: the id that mlflow has given the run.
    active: the trackers that get each line of metrics.jsonl that is written now.
    sent: for each tracker and metric, the last step that was sent, if metrics.jsonl does not show it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], pattern="^[0-9a-f]{12}$")
    mlflow: str | None = None
    active: list[str] = []
    sent: dict[str, dict[str, int]] = {}

    @classmethod
    def is_own(cls, folder: RunFolder) -> bool:
        """Whether there is a state of this folder's run, which `open` does not refuse."""
        path = folder.path / FILE
        try:
            return path.exists() and cls.model_validate_json(path.read_bytes()).name == folder.path.resolve().name
        except ValidationError:
            return False

    @classmethod
    def open(cls, folder: RunFolder, log_bytes: int) -> Self:
        """The state of a run that continues after the first `log_bytes` bytes of its metrics.jsonl; none is active.

        Raises ValueError for a file that this class has not written, and for one of another run's folder.
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
        steps = _steps(folder, log_bytes)
        for name in state.active:
            state.sent[name] = _later(state.sent.get(name, {}), steps)
        state.active = []
        return state

    def lost(self, name: str, logged: dict[str, int]) -> None:
        """A tracker has failed. logged: for each metric, the last step that it got from this process."""
        self.active.remove(name)
        self.sent[name] = _later(self.sent.get(name, {}), logged)

    def save(self, folder: RunFolder) -> None:
        folder.write_text(FILE, self.model_dump_json(indent=1))


def _later(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: max(a.get(key, -1), b.get(key, -1)) for key in a | b}


def _steps(folder: RunFolder, log_bytes: int) -> dict[str, int]:
    """The last step of each metric in the lines of metrics.jsonl behind `log_bytes`, which are about to be removed.

    A line is sent after it has been written, so a last line without an end has not been sent.
    """
    last_steps: dict[str, int] = {}
    if not folder.metrics.is_file():
        return last_steps
    *lines, _ = folder.metrics.read_bytes()[log_bytes:].split(b"\n")
    for raw in lines:
        try:
            line = parse_metrics(raw, "")
        except ValueError as error:
            raise ValueError(f"{folder.metrics} is damaged after byte {log_bytes:,}: {raw[:60]!r}") from error
        last_steps |= _later(last_steps, dict.fromkeys(line.values, int(line.step)))
    return last_steps
