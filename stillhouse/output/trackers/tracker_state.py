"""trackers.json: the names and ids of a run in the trackers, and the steps that the trackers already have."""

import uuid
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.output.folder import RunFolder
from stillhouse.output.metrics_file import parse_metrics

FILE = "trackers.json"


class TrackerState(BaseModel):
    """name: the name of the run's folder. In a copy of the folder under another name, it is the name of the original.
    id: distinguishes runs whose folders have the same name.
    mlflow: mlflow's id of the run.
    active: the trackers to which the lines of metrics.jsonl are being sent.
    sent: for each tracker and metric, the last step that was sent, unless metrics.jsonl still contains it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], pattern="^[0-9a-f]{12}$")
    mlflow: str | None = None
    active: list[str] = []
    sent: dict[str, dict[str, int]] = {}

    @classmethod
    def is_own(cls, folder: RunFolder) -> bool:
        """Whether the folder has a valid trackers.json that was not copied from another run's folder."""
        path = folder.path / FILE
        try:
            return path.exists() and cls.model_validate_json(path.read_bytes()).name == folder.path.resolve().name
        except ValidationError:
            return False

    @classmethod
    def open(cls, folder: RunFolder, log_bytes: int) -> Self:
        """The state of a run that resumes after the first `log_bytes` bytes of its metrics.jsonl. `active` is empty.

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
        steps = _steps(folder, log_bytes)
        for name in state.active:
            state.sent[name] = _later(state.sent.get(name, {}), steps)
        state.active = []
        return state

    def lost(self, name: str, logged: dict[str, int]) -> None:
        """Record that a tracker has failed. logged: for each metric, the last step that this process sent to it."""
        self.active.remove(name)
        self.sent[name] = _later(self.sent.get(name, {}), logged)

    def save(self, folder: RunFolder) -> None:
        folder.write_text(FILE, self.model_dump_json(indent=1))


def _later(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: max(a.get(key, -1), b.get(key, -1)) for key in a | b}


def _steps(folder: RunFolder, log_bytes: int) -> dict[str, int]:
    """The last step of each metric in the lines of metrics.jsonl after `log_bytes`; these lines will be removed.

    A line is sent after it has been written, so an incomplete last line has not been sent.
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
