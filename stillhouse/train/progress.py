"""How far a run is, and the state.json of a checkpoint that says so.

The state is written last of all files of a checkpoint. It holds a hash of each of the others and one of itself, so
that a file that is lost, stale, damaged or of another run does not pass for the right one.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter, ValidationError

STATE = "state.json"
PREFIX = "step-"
_OWN_HASH = "sha256"


_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not as it was written."""


@dataclass
class Progress:
    """How far a run is: steps done, target tokens trained on, seconds spent, the last evaluation.

    `data` holds a hash of each split's documents, `models` of the tokenizer and of each model's files, and
    `configuration` of the values that decide the weights: the rest of a run follows from its step only while they are
    the same. `log_bytes` and `log_sha256` are the length and the hash of metrics.jsonl. `started_from` is the
    checkpoint that the run began with, where that is not its own.
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
    started_from: str | None = None


@dataclass
class State:
    """What state.json holds.

    files: the sha256 of every other file of the checkpoint, by its path in it.
    without_moments: parameters that had no gradient so far, for which the optimizer holds nothing.
    """

    __pydantic_config__ = _STRICT

    progress: Progress
    files: dict[str, str]
    without_moments: list[str]


def write_state(folder: Path, state: State) -> None:
    """Write state.json into a checkpoint, whose other files are all there."""
    # NaN is no JSON, and no figure to be best by
    finite = {key: value for key, value in state.progress.metrics.items() if math.isfinite(value)}
    content = asdict(replace(state, progress=replace(state.progress, metrics=finite)))
    content[_OWN_HASH] = _hash(content)
    (folder / STATE).write_text(json.dumps(content, indent=1, allow_nan=False))


def read_state(path: Path) -> State:
    """The state of the checkpoint `path`.

    Raises DamagedCheckpointError where it is not as it was written, OSError where the disk does not give it.
    """
    try:
        content = json.loads((path / STATE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its {STATE} cannot be read: {error}") from error
    if not isinstance(content, dict) or _OWN_HASH not in content:
        raise DamagedCheckpointError(
            f"{path} is damaged: its {STATE} has no key '{_OWN_HASH}', or a version of stillhouse wrote it that did "
            "not hash its files yet"
        )
    if content.pop(_OWN_HASH) != _hash(content):
        raise DamagedCheckpointError(f"{path} is damaged: its {STATE} is not what was written (its hash differs)")
    try:
        state = _STATE.validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DamagedCheckpointError(f"{path} is of another version: {STATE}: {key}: {first['msg']}") from error
    if re.fullmatch(rf"{PREFIX}\d+", path.name) and path.name != folder_name(state.progress.step):
        raise DamagedCheckpointError(
            f"{path} is the checkpoint of step {state.progress.step}: expected the name "
            f"{folder_name(state.progress.step)}"
        )
    return state


def folder_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_STATE = TypeAdapter(State)
