"""The run's folder: its lock, which lets only one process write to the folder, and these files:

config.yaml  environment.json  data.json  metrics.jsonl  tokens.json  checkpoints/  hashes.json  model/  report.html
On-policy runs also write timeline.jsonl and samples.jsonl. Runs with eval.samples or eval.prompts also write
eval_samples.jsonl.
"""

import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

import stillhouse
from stillhouse.display import escaped
from stillhouse.output.disk import UNFINISHED, hashes, replace_text

LOCK = ".lock"
#: the file with a random text that identifies the run
IDENTITY = "identity"
#: the file that names the process that holds the lock, or held it when it was killed. The lock file cannot contain
#: this name, because older versions of filelock truncate the lock file at every attempt to lock it
WRITER = ".writer"
#: the file that contains a hash of every file of the final model
HASHES = "hashes.json"


class RunFolder:
    """A folder that belongs to one run.

    model: the folder of the final model, which is written last. adapter: the folder of the adapter, if the run trains
    an adapter; `model` is then the base model with the adapter merged in.
    """

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints, self.model, self.adapter = path / "checkpoints", path / "model", path / "adapter"
        self.metrics, self.timeline = path / "metrics.jsonl", path / "timeline.jsonl"
        self.samples, self.eval_samples = path / "samples.jsonl", path / "eval_samples.jsonl"

    @property
    def complete(self) -> bool:
        """Whether the final model exists."""
        return self.model.is_dir()

    def identity(self) -> str:
        """A text that is different for every run, even for runs at the same path on different machines and for copies
        of a folder. The first call writes a random number into the folder, so only one process may call this method.
        """
        path = self.path / IDENTITY
        if not path.exists():
            self.write_text(IDENTITY, secrets.token_hex(16))
        return hashlib.sha256(path.read_bytes() + str(self.path.resolve()).encode()).hexdigest()[:12]

    def owns(self, checkpoint: Path) -> bool:
        """Whether this run wrote the checkpoint; false for a checkpoint of another run that this run started from."""
        # Only the parent is resolved: the checkpoint itself may be a link to a larger disk.
        return checkpoint.parent.resolve() == self.checkpoints.resolve()

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file atomically. content: a value of JSON types and dataclasses."""
        self.write_text(name, json.dumps(content, indent=1, ensure_ascii=False, default=asdict))

    def write_text(self, name: str, content: str) -> None:
        """Write a file atomically."""
        replace_text(self.path / name, content)


def init_run_dir(folder: RunFolder, config_yaml: str) -> None:
    """Prepare the folder for this run. `candidates` must already have accepted the folder for this run."""
    folder.path.mkdir(parents=True, exist_ok=True)
    # remove the unfinished files of a killed process before the first write, because they may fill the disk
    for path in [*folder.path.glob(f"*{UNFINISHED}"), *folder.checkpoints.glob(f"*{UNFINISHED}")]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    folder.write_text("config.yaml", config_yaml)  # from now on, the folder belongs to this run
    folder.checkpoints.mkdir(exist_ok=True)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder for this process until the block ends.

    Raises ValueError if another process has locked the folder, or if the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK).acquire(timeout=0)
    except Timeout as error:
        writer = ""  # the process that has the lock
        with suppress(OSError):
            writer = f" ({escaped((folder / WRITER).read_text(encoding='utf-8', errors='replace'))})"
        raise ValueError(
            f"out: another process{writer} is writing to {folder}; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise ValueError(
            f"out: {folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error
    with lock:
        replace_text(folder / WRITER, f"process {os.getpid()} on {socket.gethostname()}")
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may be lost; the file is only used in a message
                (folder / WRITER).unlink()


def is_leftover(path: Path) -> bool:
    """Whether this file can be from a killed process: a lock, or an unfinished file."""
    return path.name in (LOCK, WRITER) or path.name.endswith(UNFINISHED)


def require_intact_model(folder: RunFolder) -> str:
    """Compare the final model and adapter of a complete run with their hashes. Return the result in words.

    Raises ValueError if a file is missing or changed. Additional files are ignored.
    """
    path = folder.path / HASHES
    if not path.is_file():
        return f"not compared: there is no {HASHES}"
    try:
        expected = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    actual = hashes(folder.path, sorted(expected))
    wrong = [name for name, file_hash in actual.items() if file_hash != expected[name]]
    if wrong:
        raise ValueError(
            f"{folder.model} is damaged: these files do not match their hashes: {', '.join(wrong[:5])}; remove "
            "that folder, and the same command writes the model again if the last checkpoint still exists"
        )
    return f"{len(actual)} files"


def environment(objective: str, seed: int, device: torch.device) -> dict[str, Any]:
    """Return the values outside the configuration that affect the results and the speed of a run."""
    versions, cpu = library_versions(), platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        cpu = next(names, cpu)
    root, commit = Path(stillhouse.__file__).parents[1], None  # the git commit, with "-dirty" if files were changed
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
        with suppress(FileNotFoundError):
            commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    return {
        "objective": objective,
        "stillhouse": versions.pop("stillhouse"),
        **versions,
        "platform": platform.platform(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def library_versions() -> dict[str, str]:
    """The versions of the libraries that affect the last digits of a result."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "stillhouse": stillhouse.__version__,
    }
