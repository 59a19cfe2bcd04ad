"""Checkpoints: everything that a run needs to continue as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights and optimizer in PyTorch's distributed checkpoint format, as safetensors
        student/       the student and its tokenizer for transformers; of a student with an adapter, only the adapter,
                       for peft
        state.json     the run's progress, and a hash of every other file (see `progress.py`)

A folder is written under another name and renamed when it is complete. So a process that is killed at any moment
leaves either the whole checkpoint or none. A checkpoint contains no pickle.
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
    """Write checkpoints/step-<n>, completely or not at all; returns its path. A collective of all ranks.

    Raises ValueError, before anything is written, if a weight or the optimizer's state is not finite, or if the disk
    has too little space.
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
    """Restore weights, optimizer and random generators; returns the progress that the checkpoint holds.

    The checkpoint may have been saved under another layout. Raises ValueError for a checkpoint of another model.
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
    # a state may be absent: the checkpoint was written on another type of device, or by fewer ranks
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
    """Remove all checkpoints but the newest `keep` and the one with the best value of the metric `best`.

    A checkpoint whose state.json is damaged is not removed; the returned list describes each such damage.
    """
    every = checkpoints(folder)
    metrics, damage = _evaluations(every)
    kept = set(every[-keep:]) | (set(every) - metrics.keys())
    if best is not None and (first := _best(metrics, best)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + UNFINISHED)
            path.rename(unfinished)  # what an interrupted removal leaves must not look like a checkpoint
            shutil.rmtree(unfinished)
    return damage


def best_checkpoint(folder: Path, metric: str) -> Path | None:
    """The checkpoint with the lowest value of a metric (highest, for an agreement); of equal ones the earliest."""
    return _best(_evaluations(checkpoints(folder))[0], metric)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one but is kept; returns its new path."""
    names = (f"{path.name}{DAMAGED}{number or ''}" for number in itertools.count())
    free = next(each for each in map(path.with_name, names) if not each.exists())
    return path.rename(free)


def _best(metrics: Mapping[Path, Mapping[str, float]], metric: str) -> Path | None:
    sign = -1.0 if metric.endswith("agreement") else 1.0
    values = [(sign * each[metric], path) for path, each in metrics.items() if metric in each]
    return min(values)[1] if values else None


def _evaluations(paths: list[Path]) -> tuple[dict[Path, dict[str, float]], list[str]]:
    """The evaluation in each checkpoint, and a description of the damage for each whose state.json is damaged."""
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
    """Raise ValueError on all ranks, naming the first tensor, if one is not finite: it would spoil the checkpoint."""
    bad = [name for name, each in tensors.items() if each.is_floating_point() and not local(each).isfinite().all()]
    bad = sorted({name for each in everywhere(bad, runner.mesh) for name in each})
    if bad:
        more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
        raise ValueError(
            f"step {step}: '{bad[0]}'{more} not finite after the update, so no checkpoint of it is written; the last "
            "checkpoint is intact. A lower train.learning_rate in another folder is the usual remedy"
        )


def _bytes_to_write(tensors: Mapping[str, Any], runner: Runner) -> int:
    """The size of a checkpoint: all tensors, and the student's weights a second time for the folder `student`."""
    weights = {name: each for name, each in tensors.items() if name.startswith(WEIGHT)}
    own = sum(_share_of(each, runner) * each.element_size() for held in (tensors, weights) for each in held.values())
    return round(sum(everywhere(own, runner.mesh)))


def _numbers(tensors: Mapping[str, Any], runner: Runner) -> int:
    """The count of numbers in weights and optimizer over all ranks; copies of the same number count once."""
    names = {name for name in tensors if not name.startswith(_RANDOM)}
    if runner.tied and runner.pipeline is not None and 0 not in runner.pairs:
        # the head's copy of a tied embedding, which only the first stage saves
        shared = runner.students()[0].embedding_name
        names -= {f"{WEIGHT}{shared}", *(f"{_MOMENT}{shared}.{key}" for key in _MOMENTS)}
    return round(sum(everywhere(sum(_share_of(tensors[name], runner) for name in names), runner.mesh)))


def _share_of(tensor: Any, runner: Runner) -> float:
    """The count of a tensor's numbers on this rank, divided by the number of ranks that hold the same numbers."""
    degrees = runner.layout.degrees
    return local(tensor).numel() / copies(tensor, degrees.processes // degrees.pipeline)


def _require_complete(final: Path, resume: Path, numbers: int, mesh: Mesh | None) -> None:
    """Raise ValueError on all ranks unless the folder that rank 0 will rename contains the files of all ranks.

    A rank that no longer sees the shared folder (because a file system was unmounted) writes its file elsewhere.
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
        # the optimizer's hyper-parameters are not saved: they come from the configuration
        tensors |= {f"{_MOMENT}{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return tensors


def _weights(runner: Runner) -> dict[str, Any]:
    """This rank's parameters and buffers of the student. A head tied to the embedding has the embedding's name.

    Frozen parameters are left out: an adapter's base weights are in the files of the base model.
    """
    weights: dict[str, Any] = {}
    for student in runner.students():
        frozen = {name for name, parameter in student.named_parameters() if not parameter.requires_grad}
        for name, value in student.state_dict().items():
            if name not in frozen:
                weights.setdefault(f"{WEIGHT}{runner.shared_name(name)}", value)
    return weights


def _owned(runner: Runner) -> dict[str, nn.Parameter]:
    """This rank's trained parameters, by their names in a checkpoint; one of two copies of a tied weight."""
    owned: dict[str, nn.Parameter] = {}
    for name, parameter in _trained(runner):
        owned.setdefault(runner.shared_name(name), parameter)
    return owned


def _trained(runner: Runner) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in runner.named_parameters() if parameter.requires_grad)


def _random_states(runner: Runner) -> dict[str, Tensor]:
    """The states of this process's random generators.

    All tensor ranks of a group load the state of the first one: dropout must drop the same elements of the hidden
    states that they all hold.
    """
    mesh = runner.mesh
    own = "" if mesh is None else f".{mesh.everyone.rank() - mesh.coordinate('tensor')}"
    device = _device(runner)
    states = {f"{_RANDOM}cpu{own}": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{_RANDOM}cuda{own}"] = torch.cuda.get_rng_state(device)
    return states


def _put_back(tensors: dict[str, Any], runner: Runner, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer's state, random generators and a tied weight's second copy from the tensors just read.

    DCP has read all other weights in place.
    """
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
    """The device on which the run computes; the weights may be offloaded to host memory."""
    return next(runner.students()[0].parameters()).device if runner.mesh is None else runner.mesh.device


def _require_fit(
    path: Path, stored: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, Any], whole: bool
) -> None:
    """Raise ValueError if a tensor of the checkpoint does not fit the student, naming the first such tensor.

    DCP itself reports less, ignores tensors that the run does not ask for, and raises an error that is not an
    Exception. wanted: the tensors that this process will load. whole: this process has the whole student, so a
    stored tensor that is not wanted is an error, too.
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
