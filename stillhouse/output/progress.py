"""The progress of a run, and the file state.json of a checkpoint, which records the progress.

state.json is written after all other files of a checkpoint. It contains a hash of every other file and of its own
content, so a file that is missing, stale, damaged or from another run is detected.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

from stillhouse.hashing import json_hash

STATE = "state.json"
PREFIX = "step-"
_OWN_HASH = "sha256"
#: keys that earlier versions wrote, and that are ignored now
_REMOVED = ("teacher_gradients", "gate")
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DamagedCheckpointError(ValueError):
    """A checkpoint whose files do not match their hashes."""


@dataclass
class Progress:
    """The progress of a run. A run can resume only if `data`, `models` and `configuration` are unchanged.

    step, tokens, seconds: the steps done, the target tokens trained on, and the time spent.
    metrics: the results of the evaluation after this step; empty if there was none.
    data: the hashes of `RunIdentity.data` (documents and media processors) and of the prompts of evaluations.
    models: the values of `RunIdentity.models`: hashes of the tokenizer and of each model's files, and others.
    configuration: a hash of the values that affect the weights.
    without_best: the number of evaluations since the last new best value, for `eval.patience`.
    log_bytes, log_sha256: the length and the hash of metrics.jsonl.
    started_from: the checkpoint of another run that this run began with, if any.
    functions, sources: the states of the user's functions as JSON, and hashes of source files (`FunctionStates`).
    """

    __pydantic_config__ = _STRICT

    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    seconds: NonNegativeFloat = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    log_bytes: NonNegativeInt = 0
    log_sha256: str = ""
    configuration: str = ""
    without_best: NonNegativeInt = 0
    started_from: str | None = None
    functions: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def saved_log(self, path: Path) -> bytes | None:
        """Return the beginning of metrics.jsonl that was saved with this progress; None if it has changed."""
        beginning = b""
        if path.is_file():
            with path.open("rb") as file:
                beginning = file.read(self.log_bytes)
        return beginning if hashlib.sha256(beginning).hexdigest() == self.log_sha256 else None


@dataclass
class State:
    """The content of state.json.

    files: the sha256 of every other file of the checkpoint, by relative path.
    without_moments: the parameters without optimizer state, because they never had a gradient.
    """

    __pydantic_config__ = _STRICT

    progress: Progress
    files: dict[str, str]
    without_moments: list[str]


def write_state(folder: Path, state: State) -> None:
    """Write state.json into a checkpoint that already contains all its other files."""
    # JSON has no NaN, and a checkpoint with a NaN must not become the best one
    finite = {key: value for key, value in state.progress.metrics.items() if math.isfinite(value)}
    content = asdict(replace(state, progress=replace(state.progress, metrics=finite)))
    content[_OWN_HASH] = json_hash(content)
    (folder / STATE).write_text(json.dumps(content, indent=1, allow_nan=False))


def read_state(path: Path) -> State:
    """Read the state of the checkpoint `path`.

    Raises DamagedCheckpointError if state.json is missing or does not match its hash, and OSError if reading fails.
    """
    try:
        content = json.loads((path / STATE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its {STATE} cannot be read: {error}") from error
    if not isinstance(content, dict) or _OWN_HASH not in content:
        raise DamagedCheckpointError(
            f"{path} is damaged: its {STATE} has no key '{_OWN_HASH}'; it may have been written by a "
            "version of stillhouse that did not hash its files yet"
        )
    if content.pop(_OWN_HASH) != json_hash(content):
        raise DamagedCheckpointError(f"{path} is damaged: its {STATE} is not what was written (its hash differs)")
    if isinstance(progress := content.get("progress"), dict):
        for removed in _REMOVED:
            progress.pop(removed, None)
    try:
        state = _STATE.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DamagedCheckpointError(f"{path} is of another version: {STATE}: {key}: {first['msg']}") from error
    step, name = state.progress.step, folder_name(state.progress.step)
    if re.fullmatch(rf"{PREFIX}\d+", path.name) and path.name != name:
        raise DamagedCheckpointError(f"{path} is the checkpoint of step {step}: expected the name {name}")
    return state


def folder_name(step: int) -> str:
    """The folder name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


_STATE = TypeAdapter(State)
