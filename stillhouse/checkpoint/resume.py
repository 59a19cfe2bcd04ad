"""Chooses the checkpoint that a run resumes from; checks that it is intact and that run, data and models match it."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stillhouse.checkpoint.checkpoint_folder import checkpoints, set_aside
from stillhouse.checkpoint.identity import configuration_hash, decisive_values
from stillhouse.checkpoint.integrity import IntactCheckpoint, verified
from stillhouse.config import ConfigError, RunConfig, load_config
from stillhouse.display import first_line
from stillhouse.output.folder import RunFolder, is_leftover
from stillhouse.output.progress import (
    STATE,
    DamagedCheckpointError,
    Progress,
    read_state,
)
from stillhouse.parallel import is_first, log_rank0
from stillhouse.run.session import Session

#: characters of a value that an error shows
SHORT = 40


def candidates(config: RunConfig) -> list[Path]:
    """The checkpoints that the run may resume from, the preferred one first; empty for a new run. Writes nothing.

    Raises ValueError if the folder contains another run, other files, or a run that must not be resumed. Raises
    ConfigError if `checkpoint.resume` names a checkpoint that does not exist or may not be used.
    """
    folder = RunFolder(Path(config.out))
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"out: {folder.path} is a file; expected a folder for the run")
    mode = config.checkpoint.resume
    if folder.path.is_dir() and any(not is_leftover(path) for path in folder.path.iterdir()):
        if mode == "never":
            raise ValueError(f"out: {folder.path} is not empty and checkpoint.resume is never; choose another folder")
        _require_same_run(folder.path, config)
    own = checkpoints(folder.checkpoints)[::-1]
    return own if mode in ("auto", "never") else _given_checkpoint(Path(mode), own)


def open_checkpoint(session: Session, folder: RunFolder, paths: Sequence[Path]) -> IntactCheckpoint | None:
    """The checkpoint to resume from, read and verified by all ranks together; None for a new run.

    paths: what `candidates` returned on rank 0 after it had locked the folder; the paths of other ranks are ignored.

    If a checkpoint is damaged and `checkpoint.fallback` is true, it is renamed and the checkpoint before it is used.
    If `checkpoint.fallback` is false, a damaged checkpoint raises ValueError. So does a checkpoint that was written
    with other data or models.
    """
    config, ranks = session.config, session.ranks
    paths = [Path(name) for name in ranks.from_first([str(path) for path in paths])]
    damaged: dict[Path, DamagedCheckpointError] = {}
    for number, path in enumerate(paths, start=1):
        try:
            checkpoint = verified(path, ranks, shared=folder.owns(path))
        except DamagedCheckpointError as error:
            older = paths[number] if number < len(paths) else None
            if older is None or not config.checkpoint.fallback:
                raise DamagedCheckpointError(f"{error}; {_remedy(path, older, folder)}") from error
            damaged[path] = error
            continue
        _require_unchanged(path, checkpoint.state.progress, session, folder)
        if is_first():
            for each, problem in damaged.items():
                log_rank0(
                    f"warning: {problem}; it was renamed to {set_aside(each)}, and the run continues from {path}"
                )
        return checkpoint
    return None


def require_unchanged_sources(path: Path, before: Progress, session: Session) -> None:
    """Raise ValueError if the configuration, documents or models are not those that the run began with."""
    if before.configuration != configuration_hash(session.config):
        raise ValueError(
            f"the configuration has changed since {path} was written: config.yaml in out was edited; restore it, or "
            "choose another folder as out"
        )
    changed = [f"data.{which}" for which, each in session.data_hashes.items() if before.data.get(which) != each]
    if changed:
        raise ValueError(
            f"{' and '.join(changed)}: the documents have changed since {path} was written; restore "
            "them, or choose another folder as out"
        )
    if changed := changed_models(before, session):
        raise ValueError(
            f"{' and '.join(changed)}: its files have changed since {path} was written; restore them, or choose "
            "another folder as out"
        )


def changed_models(before: Progress, session: Session) -> list[str]:
    """Those of student, teacher and tokenizer whose files have changed since the checkpoint was written."""
    return [which for which, each in session.model_hashes.items() if before.models.get(which) != each]


def _require_unchanged(path: Path, before: Progress, session: Session, folder: RunFolder) -> None:
    """Raise ValueError for a checkpoint of this run if its configuration, data, models or log have changed.

    For a checkpoint of another run, only warn if it has an adapter that was trained on another base model.
    """
    if folder.owns(path):
        require_unchanged_sources(path, before, session)
        if is_first():
            _require_same_log(path, folder.metrics, before)
    elif session.student.lora is not None and "student" in changed_models(before, session):
        base = session.config.student.model
        log_rank0(f"warning: the adapter in {path} was trained on another base model than {base}")


def _require_same_log(path: Path, metrics: Path, before: Progress) -> None:
    """Raise ValueError unless the log begins with exactly what it contained when the checkpoint was written."""
    beginning = b""
    if metrics.is_file():
        with metrics.open("rb") as file:
            beginning = file.read(before.log_bytes)
    if hashlib.sha256(beginning).hexdigest() != before.log_sha256:
        raise ValueError(
            f"{metrics} is damaged: its first {before.log_bytes:,} bytes are not those that were there when "
            f"{path} was written; restore it, or continue in another folder with checkpoint.resume={path}"
        )


def _remedy(path: Path, older: Path | None, folder: RunFolder) -> str:
    if not folder.owns(path):
        return "name another checkpoint as checkpoint.resume"
    if older is None:
        return "there is no earlier checkpoint: choose another folder as out to start again"
    return f"with checkpoint.fallback=true the run continues from {older.name}, the checkpoint before it"


def _require_same_run(folder: Path, config: RunConfig) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"out: {folder} contains other files and no run; choose an empty or a new folder")
    try:
        before = load_config(path)
    except ConfigError as error:
        raise ValueError(
            f"out: {folder} does not contain a run of this version of stillhouse: {path} cannot be read as a "
            f"configuration ({first_line(error)}); choose an empty or a new folder"
        ) from error
    different = _differences(before, config)
    if different:
        raise ValueError(
            f"out: {folder} contains another run, with a different {', '.join(different)}; choose another folder, "
            "or use the same configuration to continue that run. To train on from its weights, set another out and "
            "checkpoint.resume to one of its checkpoints"
        )


def _differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The dotted keys that affect the weights and whose values differ, with both values if these are short."""
    before, after = decisive_values(old), decisive_values(new)
    keys = [key for key in before | after if before.get(key) != after.get(key)]
    return [f"{key}{_both(before.get(key), after.get(key))}" for key in keys]


def _both(before: Any, after: Any) -> str:
    texts = [json.dumps(each) for each in (before, after)]
    return "" if max(map(len, texts)) > SHORT else " ({} there, {} here)".format(*texts)


def _given_checkpoint(path: Path, own: list[Path]) -> list[Path]:
    """The checkpoint at `path`, which the configuration names, or the run's own checkpoints.

    The run's own checkpoints are returned if the newest of them is `path`, or if the run began with `path`.
    """
    if own and (own[0].resolve() == path.resolve() or _started_from(own) == str(path.resolve())):
        return own
    if not (path / STATE).is_file():
        raise ConfigError(
            "checkpoint.resume",
            f"{path} is not a checkpoint; expected auto, never or <run>/checkpoints/step-<number>",
        )
    if not own:
        return [path]
    raise ConfigError(
        "checkpoint.resume",
        f"got {path}, but out already contains this run's own checkpoint {own[0]}; checkpoint.resume=auto continues "
        "from that one, and a run with a new folder as out starts from the one that you named",
    )


def _started_from(own: list[Path]) -> str | None:
    """The checkpoint that a run began with, read from the newest of its own checkpoints whose state is readable."""
    for path in own:
        try:
            return read_state(path).progress.started_from
        except DamagedCheckpointError:
            continue  # `open_checkpoint` reports the damage
    return None
