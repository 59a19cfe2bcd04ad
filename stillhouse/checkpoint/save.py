"""Saves and loads checkpoints, so that a resumed run gives the same weights as a run without interruption.

    checkpoints/step-00000500/
        resume/        weights, moments and random states (`engine/state_folder.py`), in PyTorch's distributed
                       checkpoint format (DCP), as safetensors
        student/       the student and its tokenizer for transformers; if the student has an adapter, only the adapter
                       and the tokenizer, for peft
        rollouts.safetensors    in an on-policy run, the samples that are not trained yet (`rollouts_file.py`)
        state.json     the run's progress, and a hash of every other file (`progress.py`)

The folder is written under a temporary name and renamed when it is complete. So a killed process never leaves an
incomplete checkpoint. A checkpoint contains no pickle.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stillhouse.checkpoint.export_weights import save_student
from stillhouse.checkpoint.integrity import RESUME, IntactCheckpoint
from stillhouse.checkpoint.rollouts_file import write_queue
from stillhouse.engine.engine import Engine
from stillhouse.engine.state_folder import RANDOM, stored_tensors
from stillhouse.output.disk import file_names, hashes, require_space, written_together
from stillhouse.output.progress import Progress, State, folder_name, write_state
from stillhouse.parallel import Ranks
from stillhouse.rollout import QueueState


def require_room(folder: Path, engine: Engine) -> int:
    """Return the bytes of a checkpoint of the run. Raises ValueError on all ranks if the disk has no room for it.

    folder: the folder of the run's checkpoints, which need not exist. A collective of all ranks.
    """
    needed_bytes = engine.bytes_to_save(all_moments=True)
    require_space(folder, needed_bytes, engine.student.ranks)
    return needed_bytes


def save_checkpoint(
    folder: Path,
    progress: Progress,
    engine: Engine,
    tokenizer: Any,
    queue: QueueState | None = None,
    processor_files: Sequence[Path] = (),
) -> Path:
    """Write checkpoints/step-<n>, completely or not at all; return its path. A collective of all ranks.

    queue: the queue of samples in an on-policy run; rank 0 writes it.
    processor_files: the files of the student's processor of media.
    Raises ValueError if a weight or the optimizer's state is not finite, or if the disk has too little space. In both
    cases, nothing is written.
    """
    final, ranks = folder / folder_name(progress.step), engine.student.ranks
    try:
        engine.require_finite()
    except ValueError as error:
        raise ValueError(f"step {progress.step}: {error}") from error
    needed_bytes = engine.bytes_to_save()
    require_space(folder, needed_bytes, ranks)
    with written_together(final, ranks, needed_bytes) as partial:
        saved = engine.save(partial / RESUME)
        _require_complete(final, partial / RESUME, saved.elements, ranks)
        if ranks.is_first:
            decoder, resume = engine.student.decoders[0], partial / RESUME
            save_student(partial / "student", decoder, tokenizer, resume, ranks, processor_files)
            if queue is not None:
                write_queue(partial, queue)
        names = ranks.from_first(file_names(partial) if ranks.is_first else [])
        files = {
            name: digest
            for digests in ranks.gather(hashes(partial, ranks.share(names)))
            for name, digest in digests.items()
        }
        if not all(files.values()):
            raise ValueError(_scattered(final))
        if ranks.is_first:
            write_state(partial, State(progress, files, saved.without_moments))
    return final


def load_checkpoint(checkpoint: IntactCheckpoint, engine: Engine) -> Progress:
    """Load weights, their average, optimizer and random generators; return the progress of the checkpoint.

    The checkpoint may have been saved under another layout. Raises ValueError if it was saved from another model.
    """
    engine.load(checkpoint.path / RESUME, checkpoint.state.without_moments)
    return checkpoint.state.progress


def _require_complete(final: Path, resume: Path, elements: int, ranks: Ranks) -> None:
    """Raise ValueError on all ranks unless the folder that rank 0 will rename contains the files of all ranks.

    If the shared file system was unmounted on one machine, the ranks of this machine write to a local folder.
    elements: the number of tensor elements that all ranks together have written.
    """
    stored = stored_tensors(resume) if ranks.is_first else {}
    chunks = [chunk for name, tensor in stored.items() if not name.startswith(RANDOM) for chunk in tensor.chunks]
    present = ranks.from_first(sum(math.prod(chunk.sizes) for chunk in chunks))
    if present != elements:
        raise ValueError(f"{_scattered(final)} (it contained {present:,} of {elements:,} elements)")


def _scattered(final: Path) -> str:
    return (
        f"{final} cannot be written: the ranks no longer see the same folder; the previous checkpoint is intact, and "
        "the same command continues from it once all ranks see the same folder again"
    )
