"""The run folder: who may write to it, and what every run leaves in it.

config.yaml  environment.json  data.json  metrics.jsonl  tokens.json  checkpoints/  hashes.json  model/  report.html
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
from stillhouse.config import RunConfig, dump_config
from stillhouse.train.files import explained_write_errors, file_names, hashes, remove_unfinished, replace_text

LOCK = ".lock"
#: the file with a hash of every file of the final model
HASHES = "hashes.json"


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

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def owns(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is this run's, and not the start that another run gave it."""
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def write_json(self, name: str, content: Any) -> None:
        self.write_text(name, json.dumps(content, indent=1, ensure_ascii=False))

    def write_text(self, name: str, content: str) -> None:
        """Written beside and renamed, so that a reader never sees half a file."""
        replace_text(self.path / name, content)


def init_run_dir(folder: RunFolder, config: RunConfig) -> None:
    """Make the folder this run's, after `candidates` has found it free."""
    folder.path.mkdir(parents=True, exist_ok=True)
    for each in (folder.path, folder.checkpoints):
        remove_unfinished(each)  # first, since they may be what fills the disk
    folder.write_text("config.yaml", dump_config(config))  # then what says whose folder this is
    folder.checkpoints.mkdir(exist_ok=True)


@contextmanager
def folder_lock(folder: RunFolder) -> Iterator[None]:
    """The folder as this process's until the block ends; ValueError where another one is writing to it."""
    with explained_write_errors(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(folder.path / LOCK).acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"out: another process is writing to {folder.path}; wait for it, or choose another"
            ) from error
    with lock:
        yield


def require_intact_model(folder: RunFolder) -> int:
    """Read and hash the final model of a complete run, and its adapter; returns how many files they are.

    Raises ValueError where they are not what the run wrote.
    """
    path, problem = folder.path / HASHES, ""
    try:
        expected = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        expected, problem = {}, f"{path} cannot be read: {error}"
    there = [f"{part.name}/{name}" for part in (folder.model, folder.adapter) for name in file_names(part)]
    found = hashes(folder.path, there)
    if not problem and found != expected:
        wrong = [name for name in sorted(found | expected) if found.get(name) != expected.get(name)]
        problem = f"not what was written: {', '.join(wrong[:5])}"
    if problem:
        raise ValueError(
            f"{folder.model} is damaged: {problem}; remove that folder, and the same command writes the model again "
            "from the last checkpoint"
        )
    return len(found)


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
