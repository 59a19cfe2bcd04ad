"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights and optimizer in PyTorch's distributed checkpoint format, as safetensors
        student/       the student and its tokenizer, as transformers reads them
        state.json     step, tokens, the last evaluation

A folder is written under another name and renamed when it is complete, so that a process killed at any moment leaves
either the whole checkpoint or none. There is no pickle in it.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from stillhouse.models import Decoder

_PREFIX = "step-"
_UNFINISHED = ".partial"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Progress:
    """How far a run is: steps done, target tokens trained on, seconds spent, the last evaluation."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def save_checkpoint(
    folder: Path, progress: Progress, student: Decoder, optimizer: torch.optim.Optimizer, tokenizer: Any
) -> Path:
    """Write checkpoints/step-<n> whole or not at all; returns its path."""
    final = folder / f"{_PREFIX}{progress.step:08d}"
    with atomic_folder(final) as partial:
        with _one_process():
            dcp.save(
                _tensors(student, optimizer),
                storage_writer=dcp.HuggingFaceStorageWriter(path=str(partial / "resume"), save_distributed=True),
                no_dist=True,
            )
        save_student(partial / "student", student, tokenizer)
        (partial / "state.json").write_text(json.dumps(asdict(progress), indent=1))
    return final


def load_checkpoint(path: Path, student: Decoder, optimizer: torch.optim.Optimizer) -> Progress:
    """Put weights, optimizer and random generators back as they were; returns how far the run was."""
    try:
        progress = Progress(**json.loads((path / "state.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of this version: {error}; expected a folder with state.json") from error
    tensors = _tensors(student, optimizer)
    with _one_process():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path=str(path / "resume")), no_dist=True)
    _put_back(tensors, student, optimizer)
    return progress


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if not path.name.endswith(_UNFINISHED))


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Remove all but the newest `keep` and the one with the best value of the metric `best`."""
    every = checkpoints(folder)
    kept = set(every[-keep:])
    if best is not None and (first := best_checkpoint(folder, best)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + _UNFINISHED)
            path.rename(unfinished)  # a removal that is interrupted must not look like a checkpoint
            shutil.rmtree(unfinished)


def best_checkpoint(folder: Path, metric: str) -> Path | None:
    """The checkpoint with the lowest value of a metric (the highest of an agreement); the earliest of equals."""
    sign = -1.0 if metric.endswith("agreement") else 1.0
    values = []
    for path in checkpoints(folder):
        metrics = json.loads((path / "state.json").read_text())["metrics"]
        if metric in metrics:
            values.append((sign * metrics[metric], path))
    return min(values)[1] if values else None


def remove_unfinished(folder: Path) -> None:
    """What a killed process left behind."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(path)


def save_student(folder: Path, student: Decoder, tokenizer: Any) -> None:
    """The student for exchange: Hugging Face safetensors, configuration and tokenizer."""
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write to that takes its name when the block ends without an error, after all of it is on disk."""
    partial = final.with_name(final.name + _UNFINISHED)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    yield partial
    for path in [*partial.rglob("*"), partial]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(partial, final)
    _flush(final.parent)


def _tensors(student: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    weights, moments = get_state_dict(student, optimizer, options=_FLAT)
    tensors = {f"student.{name}": value for name, value in weights.items()}
    # hyper-parameters are not tensors: they come from the configuration
    tensors |= {f"optimizer.{name}": value for name, value in moments.items() if isinstance(value, Tensor)}
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _put_back(tensors: dict[str, Tensor], student: Decoder, optimizer: torch.optim.Optimizer) -> None:
    _, moments = get_state_dict(student, optimizer, options=_FLAT)
    weights = {name: tensors[f"student.{name}"] for name in student.state_dict()}
    restored = {name: tensors.get(f"optimizer.{name}", value) for name, value in moments.items()}
    set_state_dict(student, optimizer, model_state_dict=weights, optim_state_dict=restored, options=_FLAT)
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])


@contextmanager
def _one_process() -> Iterator[None]:
    """DCP warns that there is one process only; that is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
