"""The folder of a run's checkpoints: lists them, finds the best one, removes old ones, and verifies one.

A checkpoint is intact if every file matches its hash and no chunk of a tensor is missing. PyTorch itself does not
notice if the file of one rank is missing: the shards of that rank would keep their initial values.
"""

import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from stillhouse.engine.state_folder import stored_tensors
from stillhouse.output.disk import UNFINISHED, file_names, hashes
from stillhouse.output.metrics import is_greater_better
from stillhouse.output.progress import PREFIX, STATE, DamagedCheckpointError, State, read_state
from stillhouse.parallel import ONE_PROCESS, Ranks, local_processes, local_rank

#: the subfolder of a checkpoint that contains the weights and the optimizer's state
RESUME = "resume"
#: the file with the samples of an on-policy run on which the student has not been trained yet
ROLLOUTS = "rollouts.safetensors"
_READ_TO_RESUME = (f"{RESUME}/", ROLLOUTS)
_NAMED = 3
#: the suffix that `set_aside` adds to the name of a damaged checkpoint
DAMAGED = ".damaged"


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, the oldest first."""
    named = (path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix(PREFIX)))


def prune(folder: Path, keep: int, best: str | None, greater: bool | None = None) -> list[str]:
    """Remove all checkpoints except the newest `keep`, the best one by a metric, and those with a damaged state.json.

    greater: see `best_checkpoint`.
    Returns a message for each damaged state.json.
    """
    every = checkpoints(folder)
    best_path, damage = best_checkpoint(every, best or "", greater)
    for path in every[:-keep]:
        if path != best_path and path not in damage:
            unfinished = path.with_name(path.name + UNFINISHED)
            path.rename(unfinished)  # an interrupted removal then leaves no incomplete checkpoint
            shutil.rmtree(unfinished)
    return [*damage.values()]


def best_checkpoint(
    paths: list[Path], metric: str, greater: bool | None = None
) -> tuple[Path | None, dict[Path, str]]:
    """Return the earliest checkpoint with the best value of a metric, and a message for each damaged state.json. The
    checkpoint is None if no checkpoint has the metric.

    greater: see `is_greater_better`.
    """
    sign = -1.0 if is_greater_better(metric, greater) else 1.0
    ranked, damage = list[tuple[float, Path]](), dict[Path, str]()
    for path in paths:
        try:
            metrics = read_state(path).progress.metrics
        except DamagedCheckpointError as error:
            damage[path] = str(error)
        else:
            ranked += [(sign * metrics[metric], path)] if metric in metrics else []
    return min(ranked)[1] if ranked else None, damage


def is_new_best(folder: Path, metric: str, value: float, greater: bool | None = None) -> bool:
    """Return whether a value of a metric is better than the values of all checkpoints in a folder. A value that is
    not finite is never better.
    """
    best_path, _ = best_checkpoint(checkpoints(folder), metric, greater)
    if best_path is None:
        return math.isfinite(value)
    best = read_state(best_path).progress.metrics[metric]
    return value > best if is_greater_better(metric, greater) else value < best


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that `checkpoints` no longer lists it; returns its new path."""
    names = (f"{path.name}{DAMAGED}{number or ''}" for number in itertools.count())
    return path.rename(next(free for free in map(path.with_name, names) if not free.exists()))


@dataclass(frozen=True)
class IntactCheckpoint:
    """A checkpoint whose files `verified` has read and found unchanged."""

    path: Path
    state: State


def verified(
    path: Path, ranks: Ranks = ONE_PROCESS, *, shared: bool = True, with_student: bool = False
) -> IntactCheckpoint:
    """Read a checkpoint and compare its files with their hashes. Each rank reads a share of the files. Either all
    ranks return, or all ranks raise.

    shared: whether all ranks see the same folder. If not, the ranks of each machine read all files of their folder.
    with_student: whether the folder `student` is also checked. A resumed run does not read this folder.
    Raises DamagedCheckpointError if the checkpoint is damaged. Raises ValueError if a rank cannot read the files; the
    checkpoint may be intact in this case.
    """
    with _reading_on(ranks):
        state = read_state(path)
    if len(set(ranks.gather(json.dumps(asdict(state), sort_keys=True)))) > 1:
        raise DamagedCheckpointError(f"{path} is not the same for all ranks: they read different versions of {STATE}")
    with _reading_on(ranks):
        prefixes = ("",) if with_student else _READ_TO_RESUME
        expected = {name: value for name, value in state.files.items() if name.startswith(prefixes)}
        there = {name for name in file_names(path) if name.startswith(prefixes) and name != STATE}
        # a safetensors file without a hash in state.json is an error, because it would also be loaded
        foreign = (name for name in there - expected.keys() if name.endswith(".safetensors"))
        names = sorted(expected)
        share = ranks.share(names) if shared else names[local_rank() :: local_processes()]
        actual = hashes(path, [name for name in share if name in there])
        changed = (name for name in actual if actual[name] != expected[name])
        damage = [
            *(f"{name} is lost" for name in expected.keys() - there),
            *(f"{name} does not belong to it" for name in foreign),
            *(f"{name} is not what was written (its hash differs)" for name in changed),
        ]
        if not expected:
            damage.append(f"it has no files in {RESUME}")
        if damage:
            more = f", and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
            raise DamagedCheckpointError(f"{path} is damaged: {', '.join(sorted(damage)[:_NAMED])}{more}")
    with _reading_on(ranks):
        require_covered(path, stored_tensors(path / RESUME))
    return IntactCheckpoint(path, state)


@contextmanager
def _reading_on(ranks: Ranks) -> Iterator[None]:
    with ranks.all_raise(DamagedCheckpointError, ValueError):
        try:
            yield
        except OSError as error:
            raise ValueError(f"a checkpoint cannot be read: {error}") from error


def require_covered(path: Path, stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise DamagedCheckpointError if the chunks of a tensor overlap or do not cover the tensor."""
    for name, tensor in stored.items():
        volume, overlap = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), _overlap(tensor.chunks)
        if volume != math.prod(tensor.size) or overlap:
            raise DamagedCheckpointError(
                f"{path} is damaged: the {len(tensor.chunks)} chunks of '{name}' hold {volume:,} of "
                f"{math.prod(tensor.size):,} elements{', and overlap' if overlap else ''}"
            )


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether two chunks have a common element. Sweeps along the dim with the most distinct offsets."""
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(chunks) < 2 or not chunks[0].sizes:
        return len(chunks) > 1  # two chunks of one scalar overlap
    along = max(range(len(chunks[0].sizes)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        active = [other for other in active if other.offsets[along] + other.sizes[along] > chunk.offsets[along]]
        ends = [start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        for one in active:
            sides = zip(one.offsets, one.sizes, chunk.offsets, ends, strict=True)
            if all(start < end and other < start + size for start, size, other, end in sides):
                return True
        active.append(chunk)
    return False
