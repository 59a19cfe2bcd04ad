"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights and optimizer in PyTorch's distributed checkpoint format, as safetensors
        student/       the student and its tokenizer, as transformers reads them
        state.json     step, tokens, the last evaluation, a hash of the data

A folder is written under another name and renamed when it is complete, so that a process killed at any moment leaves
either the whole checkpoint or none. There is no pickle in it.
"""

import json
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from stillhouse.models import Decoder

_PREFIX = "step-"
_UNFINISHED = ".partial"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass
class Progress:
    """How far a run is: steps done, target tokens trained on, seconds spent, the last evaluation.

    `data` holds a hash of each split's documents: a step's data follows from its number only while they are the same.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)


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
        # NaN is no JSON, and no figure to be best by
        finite = {key: value for key, value in progress.metrics.items() if math.isfinite(value)}
        state = asdict(replace(progress, metrics=finite))
        (partial / "state.json").write_text(json.dumps(state, indent=1, allow_nan=False))
    return final


def load_checkpoint(path: Path, student: Decoder, optimizer: torch.optim.Optimizer) -> Progress:
    """Put weights, optimizer and random generators back as they were; returns how far the run was.

    Raises ValueError for a checkpoint that is damaged or of another model.
    """
    progress = read_progress(path)
    tensors = _tensors(student, optimizer)
    reader = dcp.HuggingFaceStorageReader(path=str(path / "resume"))
    stored = _stored_shapes(path, reader)
    _require_fit(path, stored, tensors)
    # absent: the random state of a device it was not written on, the moments of a parameter without a gradient so far
    tensors = {name: value for name, value in tensors.items() if name in stored}
    with _one_process():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    _put_back(tensors, student, optimizer)
    return progress


def read_progress(path: Path) -> Progress:
    """How far a checkpoint is, without loading it. Raises ValueError where there is none that can be read."""
    try:
        return Progress(**json.loads((path / "state.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of this version: {error}; expected a folder with state.json"
        ) from error


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
        metrics = read_progress(path).metrics
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


def _tensors(student: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(student, optimizer, options=_FLAT)
    tensors: dict[str, Any] = {f"student.{name}": value for name, value in weights.items()}
    # hyper-parameters are not tensors: they come from the configuration
    tensors |= {f"optimizer.{name}": value for name, value in moments.items() if isinstance(value, Tensor)}
    tensors["random.cpu"] = torch.get_rng_state()
    device = next(student.parameters()).device
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _put_back(tensors: dict[str, Any], student: Decoder, optimizer: torch.optim.Optimizer) -> None:
    _, moments = get_state_dict(student, optimizer, options=_FLAT)
    weights: dict[str, Any] = {name: tensors[f"student.{name}"] for name in student.state_dict()}
    restored: dict[str, Any] = {name: tensors.get(f"optimizer.{name}", value) for name, value in moments.items()}
    set_state_dict(student, optimizer, model_state_dict=weights, optim_state_dict=restored, options=_FLAT)
    for name, parameter in student.named_parameters():
        if f"optimizer.state.{name}.step" not in tensors:
            optimizer.state.pop(parameter, None)  # only made up for the sake of its shape
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], next(student.parameters()).device)


def _stored_shapes(path: Path, reader: dcp.HuggingFaceStorageReader) -> dict[str, tuple[int, ...]]:
    try:
        stored = reader.read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it to go on from the one before") from error
    return {name: tuple(each.size) for name, each in stored.items() if isinstance(each, TensorStorageMetadata)}


def _require_fit(path: Path, stored: dict[str, tuple[int, ...]], tensors: dict[str, Any]) -> None:
    """Before DCP: it says less, leaves out what it is not asked for, and its own error is no Exception."""
    wanted = {name: tuple(value.shape) for name, value in tensors.items()}
    for name in sorted(name for name in stored.keys() | wanted.keys() if name.startswith("student.")):
        there, here = (f"of shape {shapes[name]}" if name in shapes else "absent" for shapes in (stored, wanted))
        if there != here:
            raise ValueError(
                f"{path} does not fit this student: '{name}' is {there} in the checkpoint and {here} in the run; "
                "expected the student that the checkpoint was made with, whole"
            )


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
