"""The run folder: who may write to it, and what every run leaves in it.

config.yaml  environment.json  data.json  metrics.jsonl  tokens.json  checkpoints/  model/  report.html
"""

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

import stillhouse
from stillhouse.config import ConfigError, RunConfig, dump_config, load_config
from stillhouse.train.checkpoint import checkpoints, read_progress, remove_unfinished

#: what may change between a run and its resumption: sections and keys that decide no weight but by rounding
_FREE = {
    "out",
    "eval",
    "checkpoint",
    "track",
    "device",
    "parallel",
    "teacher.parallel",
    "objective.chunk_tokens",
    "train.micro_batch_tokens",
    "train.timeout",
    "train.activation_checkpointing",
}
_LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """Of a run that trains one; `model` is then what it was trained on with the adapter added."""
        return self.path / "adapter"

    @property
    def complete(self) -> bool:
        """Whether the run has reached its end: the model is the last thing that it writes."""
        return self.model.is_dir()

    def write_json(self, name: str, content: Any) -> None:
        """Written beside and renamed, so that a reader never sees half a file."""
        self.write_text(name, json.dumps(content, indent=1, ensure_ascii=False))

    def write_text(self, name: str, content: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, self.path / name)


def claim(folder: RunFolder, config: RunConfig) -> None:
    """Make the folder this run's, after `resumable` has found it free."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_text("config.yaml", dump_config(config))  # first, since it is what says whose folder this is
    folder.checkpoints.mkdir(exist_ok=True)
    remove_unfinished(folder.checkpoints)


@contextmanager
def alone(folder: RunFolder) -> Iterator[None]:
    """The folder as this process's until the block ends; ValueError where another one is writing to it."""
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder.path / _LOCK).acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"out: another process is writing to {folder.path}; wait for it, or choose another"
        ) from error
    with lock:
        yield


def resumable(config: RunConfig) -> Path | None:
    """The checkpoint to go on from, None for a run from the start. Writes nothing.

    Raises ValueError for a folder that holds something else: another run, other files, or a run that must not be
    resumed.
    """
    folder = RunFolder(Path(config.out))
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"out: {folder.path} is a file; expected a folder for the run")
    mode = config.checkpoint.resume
    if folder.path.is_dir() and any(not _is_leftover(path) for path in folder.path.iterdir()):
        if mode == "never":
            raise ValueError(f"out: {folder.path} is not empty and checkpoint.resume is never; choose another folder")
        _require_same_run(folder.path, config)
    own = checkpoints(folder.checkpoints)
    newest = own[-1] if own else None
    return newest if mode in ("auto", "never") else _given_checkpoint(Path(mode), newest)


def require_same_data(checkpoint: Path, folder: RunFolder, data: dict[str, str]) -> None:
    """Raise ValueError where a run would go on with other documents than it began with.

    Only for a checkpoint of this run's own folder: one from elsewhere is the start of another run.
    """
    if checkpoint.resolve().parent != folder.checkpoints.resolve():
        return
    before = read_progress(checkpoint).data
    different = [f"data.{which}" for which in data if data[which] != before.get(which)]
    if different:
        raise ValueError(
            f"{' and '.join(different)}: the documents have changed since {checkpoint} was written; "
            "put them back to go on with that run, or choose another folder as out"
        )


def _is_leftover(path: Path) -> bool:
    """What a process that was killed before it had written anything may have left."""
    return path.name == _LOCK or path.name.endswith(".partial")


def _require_same_run(folder: Path, config: RunConfig) -> None:
    path = folder / "config.yaml"
    if not path.exists():
        raise ValueError(f"out: {folder} holds other files and no run; choose an empty or a new folder")
    try:
        before = load_config(path)
    except ConfigError as error:
        raise ValueError(
            f"out: {folder} holds something else: {path} is no run's configuration of this version ({error}); "
            "choose an empty or a new folder"
        ) from error
    different = _differences(before, config)
    if different:
        raise ValueError(
            f"out: {folder} holds another run, with a different {', '.join(different)}; choose another folder, "
            "or the same configuration to go on with that run"
        )


def _given_checkpoint(path: Path, newest: Path | None) -> Path:
    """The checkpoint that the configuration names, unless it would throw away what the folder's own run has done."""
    if not (path / "state.json").is_file():
        raise ConfigError(
            "checkpoint.resume",
            f"{path} is not a checkpoint; expected auto, never or <run>/checkpoints/step-<number>",
        )
    if newest is not None and newest.resolve() != path.resolve():
        raise ConfigError(
            "checkpoint.resume",
            f"got {path}, but out already holds the run's own {newest}; checkpoint.resume=auto goes on from there, "
            "and a new folder as out starts from yours",
        )
    return path


def environment(objective: str, seed: int, device: torch.device) -> dict[str, Any]:
    """What the figures of a run depend on beside its configuration."""
    return {
        "objective": objective,
        "stillhouse": stillhouse.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def _differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The dotted keys that decide the weights and are not equal."""
    before, after = _values(old), _values(new)
    return [key for key in before | after if before.get(key) != after.get(key)]


def _values(config: RunConfig) -> dict[str, Any]:
    """The values that are not free, by their dotted key."""
    values: dict[str, Any] = {}
    for section, content in config.model_dump().items():
        if isinstance(content, dict):
            values |= {f"{section}.{name}": value for name, value in content.items()}
        else:
            values[section] = content
    free = tuple(f"{key}." for key in _FREE)
    return {key: value for key, value in values.items() if not f"{key}.".startswith(free)}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the source tree that runs, if it is one, with "-dirty" behind it where files differ from it."""
    root = Path(stillhouse.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
