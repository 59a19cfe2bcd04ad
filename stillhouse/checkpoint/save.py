"""Saves and loads checkpoints, so that a resumed run gives the same weights as a run without interruption.

    checkpoints/step-00000500/
        resume/        weights, moments and random states (`engine/state_folder.py`), in PyTorch's distributed
                       checkpoint format (DCP), as safetensors
        student/       the student and its tokenizer in transformers' format; if the student has an adapter, only the
                       adapter in peft's format and the tokenizer
        rollouts.safetensors    in an on-policy run, the finished samples on which the student is not trained yet
        state.json     the run's progress, and a hash of every other file (`progress.py`)

The folder is written under a temporary name and renamed when it is complete. So a killed process never leaves an
incomplete checkpoint. A checkpoint contains no pickle.

R samples with N tokens in total.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError
from safetensors import safe_open
from safetensors.numpy import save_file

from stillhouse.checkpoint.checkpoint_folder import RESUME, ROLLOUTS, IntactCheckpoint
from stillhouse.checkpoint.export_weights import save_student
from stillhouse.data.offsets import offsets_of
from stillhouse.engine.engine import Engine
from stillhouse.engine.state_folder import RANDOM, stored_tensors
from stillhouse.libraries import first_problem, reading
from stillhouse.output.disk import file_names, hashes, require_space, written_together
from stillhouse.output.progress import DamagedCheckpointError, Progress, State, folder_name, write_state
from stillhouse.rollout import Completion, QueueState, Sample

_FINISHES: tuple[Literal["stop", "length"], ...] = ("stop", "length")
#: the arrays of rollouts.safetensors: dtype, and a function that returns a sample's values. Names end with their dim
_ARRAYS: dict[str, tuple[type, Callable[[Sample], Any]]] = {
    "number_R": (np.int64, lambda sample: [sample.number]),
    "prompt_R": (np.int64, lambda sample: [sample.prompt]),
    "tokens_R": (np.int64, lambda sample: [len(sample.completion.ids_N)]),
    "finish_R": (np.uint8, lambda sample: [_FINISHES.index(sample.completion.finish)]),
    "has_reward_R": (np.uint8, lambda sample: [sample.reward is not None]),
    "reward_R": (np.float64, lambda sample: [sample.reward or 0.0]),
    "ids_N": (np.int32, lambda sample: sample.completion.ids_N),
    "log_probs_N": (np.float32, lambda sample: sample.completion.log_probs_N),
    "versions_N": (np.int32, lambda sample: sample.completion.versions_N),
    "is_written_N": (np.uint8, lambda sample: sample.is_generated_N),
}
#: the largest values of some arrays
_LARGEST = {"finish_R": len(_FINISHES) - 1, "has_reward_R": 1, "is_written_N": 1}


def require_room(folder: Path, engine: Engine) -> int:
    """Return the size of a checkpoint in bytes. Raises ValueError on all ranks if the disk has no room for it."""
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
    """Write checkpoints/step-<n> and return its path. A failure leaves no checkpoint. A collective of all ranks.

    queue: the queue of samples in an on-policy run.
    Raises ValueError, and writes nothing, if the state is not finite or the disk has too little space.
    """
    final, ranks = folder / folder_name(progress.step), engine.student.ranks
    scattered = (
        f"{final} cannot be written: the ranks no longer see the same folder; the previous checkpoint is intact, and "
        "the same command continues from it once all ranks see the same folder again"
    )
    try:
        engine.require_finite()
    except ValueError as error:
        raise ValueError(f"step {progress.step}: {error}") from error
    needed_bytes = engine.bytes_to_save()
    require_space(folder, needed_bytes, ranks)
    with written_together(final, ranks, needed_bytes) as partial:
        saved = engine.save(partial / RESUME)
        # if one machine has lost the shared file system, its ranks wrote locally, and rank 0 finds too few elements
        stored = stored_tensors(partial / RESUME) if ranks.is_first else {}
        chunks = [chunk for name, tensor in stored.items() if not name.startswith(RANDOM) for chunk in tensor.chunks]
        present = ranks.from_first(sum(math.prod(chunk.sizes) for chunk in chunks))
        if present != saved.elements:
            raise ValueError(f"{scattered} (it contained {present:,} of {saved.elements:,} elements)")
        if ranks.is_first:
            decoder, resume = engine.student.decoders[0], partial / RESUME
            save_student(partial / "student", decoder, tokenizer, resume, ranks, processor_files)
            if queue is not None:
                write_queue(partial, queue)
        names = ranks.from_first(file_names(partial) if ranks.is_first else [])
        digests = ranks.gather(hashes(partial, ranks.share(names)))
        files = {name: digest for rank_files in digests for name, digest in rank_files.items()}
        if not all(files.values()):
            raise ValueError(scattered)
        if ranks.is_first:
            write_state(partial, State(progress, files, saved.without_moments))
    return final


def load_checkpoint(checkpoint: IntactCheckpoint, engine: Engine) -> Progress:
    """Load weights, averaged weights, optimizer state and random states, and return the checkpoint's progress. The
    checkpoint may have been written under any layout.

    Raises ValueError if the checkpoint was saved from another model.
    """
    engine.load(checkpoint.path / RESUME, checkpoint.state.without_moments)
    return checkpoint.state.progress


class _Groups(BaseModel):
    """The groups of the samples, and three lists with one value per sample, which earlier versions did not write."""

    model_config = ConfigDict(strict=True)

    asked_at: list[tuple[int, int]]
    trained: list[int]
    reward_parts: list[tuple[FiniteFloat, ...]] | None = None
    tool_calls: list[tuple[NonNegativeInt, NonNegativeInt]] | None = None
    object_rewards: list[FiniteFloat | None] | None = None


def write_queue(folder: Path, state: QueueState) -> None:
    """Write the samples of a queue to rollouts.safetensors."""
    samples = state.samples
    arrays: dict[str, np.ndarray] = {
        name: np.concatenate([np.zeros(0, dtype), *map(values, samples)]).astype(dtype)
        for name, (dtype, values) in _ARRAYS.items()
    }
    groups = {
        "asked_at": list(state.requested_at.items()),
        "trained": state.trained,
        "reward_parts": [sample.reward_parts for sample in samples],
        "tool_calls": [[sample.tool_calls, sample.tool_errors] for sample in samples],
        "object_rewards": [sample.object_reward for sample in samples],
    }
    save_file(arrays, folder / ROLLOUTS, metadata={"groups": json.dumps(groups)})


def read_queue(checkpoint: IntactCheckpoint) -> QueueState:
    """Read a checkpoint's samples. Raises ValueError if rollouts.safetensors is missing or has another format."""
    path = checkpoint.path / ROLLOUTS
    if ROLLOUTS not in checkpoint.state.files:
        raise DamagedCheckpointError(f"{checkpoint.path} has no {ROLLOUTS}: it is not of an on-policy run")
    with reading(f"{path} cannot be read"), safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()["groups"]
    try:
        groups = _Groups.model_validate_json(metadata)
        if arrays.keys() != _ARRAYS.keys():
            raise ValueError(f"got the arrays {sorted(arrays)}: expected {sorted(_ARRAYS)}")
        for name, (dtype, _) in _ARRAYS.items():
            if arrays[name].dtype != dtype or arrays[name].ndim != 1:
                what = f"{name} has dtype {arrays[name].dtype} and {arrays[name].ndim} dimensions"
                raise ValueError(f"{what}: expected {np.dtype(dtype)} and 1 dimension")
        requested_at = dict(groups.asked_at)
        count, tokens = len(arrays["tokens_R"]), int(arrays["tokens_R"].sum())
        for name, array in arrays.items():
            expected = count if name.endswith("_R") else tokens
            if len(array) != expected:
                raise ValueError(f"{name} has {len(array)} values: expected {expected}, for {count} samples")
            if len(array) and array.max() > _LARGEST.get(name, math.inf):
                raise ValueError(f"{name} has the value {array.max()}: expected 0 to {_LARGEST[name]}")
        if count and arrays["tokens_R"].min() < 1:
            raise ValueError("a sample has no tokens")
        if len(requested_at) != len(groups.asked_at):
            raise ValueError("a group was requested more than once")
        added = {name: getattr(groups, name) for name in ("reward_parts", "tool_calls", "object_rewards")}
        for name, values in added.items():
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} values: expected {count}")
        if any(errors > calls for calls, errors in groups.tool_calls or ()):
            raise ValueError(f"tool_calls {str(groups.tool_calls)[:80]}: expected at most as many errors as calls")
        ends = pairwise(offsets_of(arrays["tokens_R"]).tolist())
        samples = [_sample(arrays, number, slice(*places), added) for number, places in enumerate(ends)]
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path} cannot be read: {problem}") from error
    return QueueState(samples, requested_at, groups.trained)


def _sample(arrays: Mapping[str, np.ndarray], number: int, tokens: slice, added: Mapping[str, Any]) -> Sample:
    """Return sample `number`, whose tokens are at `tokens` in the arrays.

    added: for each field of `_Groups` that earlier versions did not write, the values of all samples, or None.
    """
    ids_N, log_probs_N, versions_N = (arrays[name][tokens] for name in ("ids_N", "log_probs_N", "versions_N"))
    sample = Sample(
        int(arrays["number_R"][number]),
        int(arrays["prompt_R"][number]),
        Completion(ids_N, log_probs_N, versions_N, _FINISHES[arrays["finish_R"][number]]),
        float(arrays["reward_R"][number]) if arrays["has_reward_R"][number] else None,
    )
    if (sample.is_generated_N != arrays["is_written_N"][tokens]).any():
        problem = "has generated tokens without a version of the weights, or other tokens with one"
        raise ValueError(f"sample {sample.number} {problem}")
    absent: dict[str, Any] = {"reward_parts": (), "tool_calls": (0, 0), "object_rewards": None}
    parts, (calls, errors), object_reward = (
        absent[name] if values is None else values[number] for name, values in added.items()
    )
    return replace(sample, reward_parts=parts, tool_calls=calls, tool_errors=errors, object_reward=object_reward)
