"""Writes and reads checkpoints: everything that a run needs to continue as if it had never stopped.

    checkpoints/step-00000500/
        resume/        weights, moments and random states (`checkpoint_tensors.py`), in PyTorch's distributed
                       checkpoint format (DCP), as safetensors
        student/       the student and its tokenizer for transformers; of a student with an adapter, only the adapter,
                       for peft
        rollouts.safetensors    of an on-policy run, the samples that are not trained (`queue_file.py`)
        state.json     the run's progress, and a hash of every other file (`progress.py`)

A folder is written under another name and renamed when it is complete. So a process that is killed at any moment
leaves either the whole checkpoint or none. A checkpoint contains no pickle.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from stillhouse.checkpoint.checkpoint_tensors import (
    RANDOM,
    averages,
    bytes_to_write,
    checkpoint_tensors,
    element_count,
    empty_moments,
    parameters_without_moments,
    random_states,
    require_fit,
    restore,
    student_weights,
)
from stillhouse.checkpoint.export_weights import one_process, save_student
from stillhouse.checkpoint.integrity import RESUME, IntactCheckpoint, stored_tensors
from stillhouse.checkpoint.queue_file import write_queue
from stillhouse.generation import QueueState
from stillhouse.output.files import (
    file_names,
    hashes,
    require_space,
    written_together,
)
from stillhouse.output.progress import (
    Progress,
    State,
    folder_name,
    write_state,
)
from stillhouse.parallel import Ranks, Runner
from stillhouse.parallel.gradients import local
from stillhouse.signals import WeightAverage


def save_checkpoint(
    folder: Path,
    progress: Progress,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    tokenizer: Any,
    average: WeightAverage | None = None,
    queue: QueueState | None = None,
) -> Path:
    """Write checkpoints/step-<n>, completely or not at all; returns its path. A collective of all ranks.

    average: of the student's weights, if the run has one. queue: of an on-policy run; rank 0 writes it.
    Raises ValueError, before anything is written, if a weight or the optimizer's state is not finite, or if the disk
    has too little space.
    """
    final, ranks = folder / folder_name(progress.step), runner.ranks
    tensors = checkpoint_tensors(runner, optimizer, average)
    _require_finite(progress.step, tensors, runner)
    needed_bytes = bytes_to_write(tensors, runner)
    require_space(folder, needed_bytes, ranks)
    with written_together(final, ranks, needed_bytes) as partial:
        _save_tensors(partial / RESUME, tensors, ranks)
        _require_complete(final, partial / RESUME, element_count(tensors, runner), ranks)
        if ranks.is_first:
            save_student(partial / "student", runner, tokenizer, partial / RESUME)
            if queue is not None:
                write_queue(partial, queue)
        names = ranks.from_first(file_names(partial) if ranks.is_first else [])
        shares = ranks.gather(hashes(partial, ranks.share(names)))
        files = {name: each for own in shares for name, each in own.items()}
        if not all(files.values()):
            raise ValueError(_scattered(final))
        without_moments = parameters_without_moments(runner, optimizer)
        if ranks.is_first:
            write_state(partial, State(progress, files, without_moments))
    return final


def load_checkpoint(
    checkpoint: IntactCheckpoint,
    runner: Runner,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None = None,
) -> Progress:
    """Restore weights, their average, optimizer and random generators; returns the progress of the checkpoint.

    The checkpoint may have been saved under another layout. Raises ValueError for a checkpoint of another model.
    """
    path, state = checkpoint.path, checkpoint.state
    stored = stored_tensors(path / RESUME)
    moments = empty_moments(runner, optimizer, state.without_moments)
    wanted = student_weights(runner) | moments | averages(runner, average)
    require_fit(path, stored, wanted, whole=runner.layout.stages == 1)
    # a state may be absent: the checkpoint was written on another type of device, or by fewer ranks
    random = {name: value for name, value in random_states(runner).items() if name in stored}
    tensors = wanted | random
    with one_process():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path=str(path / RESUME)), no_dist=True)
    restore(tensors, runner, optimizer, average)
    return state.progress


def _save_tensors(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    if ranks.group is None:
        with one_process():
            dcp.save(tensors, storage_writer=writer, no_dist=True)
    else:
        dcp.save(tensors, storage_writer=writer, process_group=ranks.group)


def _require_finite(step: int, tensors: Mapping[str, Any], runner: Runner) -> None:
    """Raise ValueError on all ranks, naming the first tensor that is not finite: no run could continue from it."""
    bad = [name for name, each in tensors.items() if each.is_floating_point() and not local(each).isfinite().all()]
    bad = sorted({name for each in runner.ranks.gather(bad) for name in each})
    if bad:
        more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
        raise ValueError(
            f"step {step}: '{bad[0]}'{more} not finite after the update, so no checkpoint of it is written. "
            "The last checkpoint is intact. The usual remedy is a run in another folder with a lower "
            "train.learning_rate"
        )


def _require_complete(final: Path, resume: Path, elements: int, ranks: Ranks) -> None:
    """Raise ValueError on all ranks unless the folder that rank 0 will rename contains the files of all ranks.

    A rank that no longer sees the shared folder (because a file system was unmounted) writes its file elsewhere.
    elements: the number of elements that all ranks have written.
    """
    stored = stored_tensors(resume) if ranks.is_first else {}
    chunks = [chunk for name, each in stored.items() if not name.startswith(RANDOM) for chunk in each.chunks]
    found = ranks.from_first(sum(math.prod(chunk.sizes) for chunk in chunks))
    if found != elements:
        raise ValueError(f"{_scattered(final)} (it contained {found:,} of {elements:,} elements)")


def _scattered(final: Path) -> str:
    return (
        f"{final} cannot be written: the ranks no longer see the same folder; the previous checkpoint is intact, and "
        "the same command continues from it once all ranks see the same folder again"
    )
