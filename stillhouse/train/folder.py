"""The run folder: who may write to it, and what every run leaves in it.

    config.yaml  environment.json  data.json  metrics.jsonl  tokens.json  checkpoints/  model/  report.html
"""

import json
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import stillhouse
from stillhouse.config import RunConfig, dump_config, load_config
from stillhouse.train.checkpoint import checkpoints, remove_unfinished

#: what may change between a run and its resumption: none of it changes a weight
_FREE = {"eval", "checkpoint", "track", "device"}
_FREE_TRAIN = {"micro_batch_tokens", "activation_checkpointing"}


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
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def write_json(self, name: str, content: Any) -> None:
        """Written beside and renamed, so that a reader never sees half a file."""
        self.write_text(name, json.dumps(content, indent=1, ensure_ascii=False))

    def write_text(self, name: str, content: str) -> None:
        partial = self.path / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, self.path / name)


def claim(config: RunConfig) -> RunFolder:
    """Make the folder this run's, after `resumable` has found it free."""
    folder = RunFolder(Path(config.out))
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder.checkpoints)
    folder.write_text("config.yaml", dump_config(config))
    return folder


def resumable(config: RunConfig) -> Path | None:
    """The checkpoint to go on from, None for a run from the start. Writes nothing.

    Raises ValueError for a folder that holds something else: another run, other files, or a run that must not be
    resumed.
    """
    folder = RunFolder(Path(config.out))
    if folder.path.exists() and not folder.path.is_dir():
        raise ValueError(f"out: {folder.path} is a file; expected a folder for the run")
    mode = config.checkpoint.resume
    if mode not in ("auto", "never"):
        return Path(mode)
    if not folder.path.is_dir() or not any(folder.path.iterdir()):
        return None
    if mode == "never":
        raise ValueError(f"out: {folder.path} is not empty and checkpoint.resume is never; choose another folder")
    if not (folder.path / "config.yaml").exists():
        raise ValueError(f"out: {folder.path} holds other files and no run; choose an empty or a new folder")
    different = _differences(load_config(str(folder.path / "config.yaml")), config)
    if different:
        raise ValueError(
            f"out: {folder.path} holds another run, with a different {', '.join(different)}; choose another folder, "
            "or the same configuration to go on with that run"
        )
    every = checkpoints(folder.checkpoints)
    return every[-1] if every else None


def environment(session_words: str, seed: int, device: torch.device) -> dict[str, Any]:
    """What the figures of a run depend on beside its configuration."""
    return {
        "objective": session_words,
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
    before, after = old.model_dump(), new.model_dump()
    keys = []
    for section in before:
        if section in _FREE or section == "out":
            continue
        if not isinstance(before[section], dict) or not isinstance(after[section], dict):
            keys += [section] if before[section] != after[section] else []
            continue
        for name in before[section]:
            if before[section][name] != after[section][name] and not (section == "train" and name in _FREE_TRAIN):
                keys.append(f"{section}.{name}")
    return keys


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str | None:
    """The commit of the source tree that runs, if it is one."""
    root = Path(stillhouse.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None
