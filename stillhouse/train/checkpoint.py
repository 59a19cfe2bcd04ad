"""Checkpoints: everything that a run needs to go on as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights and optimizer in PyTorch's distributed checkpoint format, as safetensors
        student/       the student and its tokenizer, as transformers reads them; an adapter by itself, as peft does
        state.json     how far the run is, and a hash of every other file (see `progress.py`)

A folder is written under another name and renamed when it is complete, so that a process killed at any moment leaves
either the whole checkpoint or none. There is no pickle in it.
"""

import itertools
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stillhouse.parallel import Mesh, Runner, is_first
from stillhouse.parallel.gradients import copies, local
from stillhouse.train.export import WEIGHT, one_process, save_student
from stillhouse.train.files import (
    UNFINISHED,
    everywhere,
    file_names,
    hashes,
    require_space,
    share,
    written_together,
)
from stillhouse.train.integrity import RESUME, IntactCheckpoint, stored_tensors
from stillhouse.train.progress import (
    PREFIX,
    DamagedCheckpointError,
    Progress,
    State,
    folder_name,
    read_state,
    write_state,
)

_MOMENT = "optimizer.state."
_RANDOM = "random."
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
#: in the name of a checkpoint that `set_aside` has renamed
DAMAGED = ".damaged"


def save_checkpoint(
    folder: Path, progress: Progress, runner: Runner, optimizer: torch.optim.Optimizer, tokenizer: Any
) -> Path:
    """Write checkpoints/step-<n> whole or not at all; returns its path. All ranks take part.

    Raises ValueError, before anything is written, where a weight or the optimizer's state is not finite, or where
    the disk has too little space.
    """
    final, mesh = folder / folder_name(progress.step), runner.mesh
    tensors = _tensors(runner, optimizer)
    _require_finite(progress.step, tensors, runner)
    needed_bytes = _bytes_to_write(tensors, runner)
    require_space(folder, needed_bytes, mesh)
    with written_together(final, mesh, needed_bytes) as partial:
        _save_tensors(partial / RESUME, tensors, mesh)
        _require_complete(final, partial / RESUME, _numbers(tensors, runner), mesh)
        if is_first():
            save_student(partial / "student", runner, tokenizer, partial / RESUME)
        names = everywhere(file_names(partial) if is_first() else [], mesh)[0]
        shares = everywhere(hashes(partial, share(names, mesh)), mesh)
        files = {name: each for own in shares for name, each in own.items()}
        if not all(files.values()):
            raise ValueError(_scattered(final))
        own = [name for name, parameter in _owned(runner).items() if parameter not in optimizer.state]
        without = sorted({name for each in everywhere(own, mesh) for name in each})
        if is_first():
            write_state(partial, State(progress, files, without))
    return final


def load_checkpoint(checkpoint: IntactCheckpoint, runner: Runner, optimizer: torch.optim.Optimizer) -> Progress:
    """Put weights, optimizer and random generators back as they were; returns how far the run was.

    The layout need not be the one that it was saved under. Raises ValueError for a checkpoint of another model.
    """
    path, state = checkpoint.path, checkpoint.state
    stored = stored_tensors(path / RESUME)
    weights = _weights(runner)
    moments = {
        f"{_MOMENT}{name}.{key}": torch.zeros_like(parameter) if key != "step" else torch.zeros(())
        for name, parameter in _owned(runner).items()
        for key in _MOMENTS
        if name not in state.without_moments
    }
    _require_fit(path, stored, weights | moments, whole=runner.layout.stages == 1)
    # absent: the random state of a device that it was not written on, or of another layout's rank
    random = {name: value for name, value in _random_states(runner).items() if name in stored}
    tensors = {**weights, **moments, **random}
    with one_process():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path=str(path / RESUME)), no_dist=True)
    _put_back(tensors, runner, optimizer)
    return state.progress


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    named = (path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix(PREFIX)))


def prune(folder: Path, keep: int, best: str | None) -> list[str]:
    """Remove all but the newest `keep` and the one with the best value of the metric `best`.

    Returns what is wrong with the state of any that is damaged; such a one is not removed.
    """
    every = checkpoints(folder)
    metrics, damage = _evaluations(every)
    kept = set(every[-keep:]) | (set(every) - metrics.keys())
    if best is not None and (first := _best(metrics, best)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + UNFINISHED)
            path.rename(unfinished)  # a removal that is interrupted must not look like a checkpoint
            shutil.rmtree(unfinished)
    return damage


def best_checkpoint(folder: Path, metric: str) -> Path | None:
    """The checkpoint with the lowest value of a metric (the highest of an agreement); the earliest of equals."""
    return _best(_evaluations(checkpoints(folder))[0], metric)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is none any more and nothing of it is lost; returns its new path."""
    names = (f"{path.name}{DAMAGED}{number or ''}" for number in itertools.count())
    free = next(each for each in map(path.with_name, names) if not each.exists())
    return path.rename(free)


def _best(metrics: Mapping[Path, Mapping[str, float]], metric: str) -> Path | None:
    sign = -1.0 if metric.endswith("agreement") else 1.0
    values = [(sign * each[metric], path) for path, each in metrics.items() if metric in each]
    return min(values)[1] if values else None


def _evaluations(paths: list[Path]) -> tuple[dict[Path, dict[str, float]], list[str]]:
    """The last evaluation of each checkpoint, and what is wrong with those whose state is damaged."""
    metrics: dict[Path, dict[str, float]] = {}
    damage: list[str] = []
    for path in paths:
        try:
            metrics[path] = read_state(path).progress.metrics
        except DamagedCheckpointError as error:
            damage.append(str(error))
    return metrics, damage


def _save_tensors(folder: Path, tensors: dict[str, Any], mesh: Mesh | None) -> None:
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    if mesh is None:
        with one_process():
            dcp.save(tensors, storage_writer=writer, no_dist=True)
    else:
        dcp.save(tensors, storage_writer=writer, process_group=mesh.everyone)


def _require_finite(step: int, tensors: Mapping[str, Any], runner: Runner) -> None:
    """Raise ValueError on all ranks, naming the first tensor, where one is not finite: it would spoil the file."""
    bad = [name for name, each in tensors.items() if each.is_floating_point() and not local(each).isfinite().all()]
    bad = sorted({name for each in everywhere(bad, runner.mesh) for name in each})
    if bad:
        more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
        raise ValueError(
            f"step {step}: '{bad[0]}'{more} not finite after the update, so no checkpoint of it is written; the last "
            "checkpoint is intact. A lower train.learning_rate in another folder is the usual remedy"
        )


def _bytes_to_write(tensors: Mapping[str, Any], runner: Runner) -> int:
    """Size of a checkpoint: all tensors, and the student's weights once more for exchange."""
    weights = {name: each for name, each in tensors.items() if name.startswith(WEIGHT)}
    own = sum(_share_of(each, runner) * each.element_size() for held in (tensors, weights) for each in held.values())
    return round(sum(everywhere(own, runner.mesh)))


def _numbers(tensors: Mapping[str, Any], runner: Runner) -> int:
    """How many numbers weights and optimizer have, over all ranks."""
    names = {name for name in tensors if not name.startswith(_RANDOM)}
    if runner.tied and runner.pipeline is not None and 0 not in runner.twins:
        # the head's copy of the embedding, which is the first stage's to save
        shared = runner.students()[0].embedding_name
        names -= {f"{WEIGHT}{shared}", *(f"{_MOMENT}{shared}.{key}" for key in _MOMENTS)}
    return round(sum(everywhere(sum(_share_of(tensors[name], runner) for name in names), runner.mesh)))


def _share_of(tensor: Any, runner: Runner) -> float:
    """The numbers of a tensor that are on this rank, each divided by how many ranks hold it."""
    degrees = runner.layout.degrees
    return local(tensor).numel() / copies(tensor, degrees.processes // degrees.pipeline)


def _require_complete(final: Path, resume: Path, numbers: int, mesh: Mesh | None) -> None:
    """Raise ValueError on all ranks unless the files of all ranks are in the one folder that rank 0 is to rename.

    A rank that has lost the folder (a file system that is not mounted any more) writes its file elsewhere.
    """
    stored = stored_tensors(resume) if is_first() else {}
    chunks = [chunk for name, each in stored.items() if not name.startswith(_RANDOM) for chunk in each.chunks]
    held = everywhere(sum(math.prod(chunk.sizes) for chunk in chunks), mesh)[0]
    if held != numbers:
        raise ValueError(f"{_scattered(final)} ({held:,} of {numbers:,} numbers were in it)")


def _scattered(final: Path) -> str:
    return (
        f"{final} cannot be written: the ranks do not see one folder any more; the checkpoint before is intact, and "
        "the same command goes on from there once they do"
    )


def _tensors(runner: Runner, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = _weights(runner) | _random_states(runner)
    for name, parameter in _owned(runner).items():
        # hyper-parameters are not tensors: they come from the configuration
        tensors |= {f"{_MOMENT}{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def _weights(runner: Runner) -> dict[str, Any]:
    """The student's parameters and buffers that are here, a weight that two stages share by the embedding's name.

    Without what is frozen, beside an adapter: that is in the files of the model that it was trained on.
    """
    weights: dict[str, Any] = {}
    for student in runner.students():
        frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
        for name, value in student.state_dict().items():
            if name not in frozen:
                weights.setdefault(f"{WEIGHT}{runner.shared_name(name)}", value)
    return weights


def _owned(runner: Runner) -> dict[str, nn.Parameter]:
    """What trains, of what is here, by its name in a checkpoint; a parameter that is here twice, once."""
    owned: dict[str, nn.Parameter] = {}
    for name, parameter in _trained(runner):
        owned.setdefault(runner.shared_name(name), parameter)
    return owned


def _trained(runner: Runner) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in runner.named_parameters() if parameter.requires_grad)


def _random_states(runner: Runner) -> dict[str, Tensor]:
    """Of this process's generators. Tensor ranks share theirs: dropout must drop the same of what all have."""
    mesh = runner.mesh
    own = "" if mesh is None else f".{mesh.everyone.rank() - mesh.place('tensor')}"
    device = _device(runner)
    states = {f"{_RANDOM}cpu{own}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{_RANDOM}cuda{own}"] = torch.cuda.get_rng_state(device)
    return states


def _put_back(tensors: dict[str, Any], runner: Runner, optimizer: torch.optim.Optimizer) -> None:
    """The weights are where they belong, since they were read in place."""
    owned = _owned(runner)
    for name, parameter in _trained(runner):
        shared = runner.shared_name(name)
        found = {key: tensors.get(f"{_MOMENT}{shared}.{key}") for key in _MOMENTS}
        if parameter is not owned[shared]:
            local(parameter.detach()).copy_(local(owned[shared].detach()))
            found = {key: None if value is None else value.clone() for key, value in found.items()}
        optimizer.state.pop(parameter, None)
        if found["step"] is not None:
            optimizer.state[parameter] = found
    for name in _random_states(runner).keys() & tensors.keys():
        if name.startswith(f"{_RANDOM}cpu"):
            torch.set_rng_state(tensors[name])
        else:
            torch.cuda.set_rng_state(tensors[name], _device(runner))


def _device(runner: Runner) -> torch.device:
    """Where the run computes; its weights may be in host memory."""
    return next(runner.students()[0].parameters()).device if runner.mesh is None else runner.mesh.device


def _require_fit(
    path: Path, stored: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, Any], whole: bool
) -> None:
    """Before DCP: it says less, leaves out what it is not asked for, and its own error is no Exception.

    whole: this process has the whole student, so that what it does not ask for is too much.
    """
    shapes = {name: tuple(each.size) for name, each in stored.items()}
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    names = shapes.keys() | expected.keys() if whole else expected.keys()
    for name in sorted(name for name in names if name.startswith((WEIGHT, _MOMENT))):
        there, here = (f"of shape {each[name]}" if name in each else "absent" for each in (shapes, expected))
        if there != here:
            raise ValueError(
                f"{path} does not fit this student: '{name}' is {there} in the checkpoint and {here} in the run; "
                "expected the student that the checkpoint was made with, whole"
            )
