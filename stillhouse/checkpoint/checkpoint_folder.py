"""The folder of a run's checkpoints: lists them, finds the best one, removes old ones, and verifies one.

A checkpoint is unchanged and complete if every file has its hash, and every tensor all of its chunks. PyTorch does
not notice that the file of one rank is lost: the shards of that rank would keep their initial values.
"""

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from stillhouse.engine.state_folder import stored_tensors
from stillhouse.output.disk import UNFINISHED, file_names, hashes
from stillhouse.output.progress import PREFIX, STATE, DamagedCheckpointError, State, read_state
from stillhouse.parallel import ONE_PROCESS, Ranks, local_processes, local_rank

#: the subfolder of a checkpoint that contains the weights and the optimizer's state
RESUME = "resume"
#: the file with the samples of an on-policy run that are not trained yet
ROLLOUTS = "rollouts.safetensors"
_READ_TO_RESUME = (f"{RESUME}/", ROLLOUTS)
_NAMED = 3
#: the suffix that `set_aside` adds to the name of a damaged checkpoint
DAMAGED = ".damaged"

Content = TypeVar("Content")


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    named = (path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix(PREFIX)))


def prune(folder: Path, keep: int, best: str | None, greater: bool | None = None) -> list[str]:
    """Remove all checkpoints except the newest `keep` and the one with the best value of the metric `best`.

    greater: true if a higher value of the metric is better; None: true for agreement and exact match only.
    Checkpoints with a damaged state.json are kept. Returns one message for each of them.
    """
    every = checkpoints(folder)
    metrics, damage = _evaluations(every)
    kept = set(every[-keep:]) | (set(every) - metrics.keys())
    if best is not None and (first := _best(metrics, best, greater)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + UNFINISHED)
            path.rename(unfinished)  # an interrupted removal must not leave a folder that looks like a checkpoint
            shutil.rmtree(unfinished)
    return damage


def best_checkpoint(paths: list[Path], metric: str, greater: bool | None = None) -> tuple[Path | None, list[str]]:
    """The checkpoint with the best value of a metric (None if no checkpoint has the metric), and one message for each
    damaged state.json. greater: as in `prune`.
    """
    metrics, damage = _evaluations(paths)
    return _best(metrics, metric, greater), damage


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that `checkpoints` no longer lists it; returns its new path."""
    names = (f"{path.name}{DAMAGED}{number or ''}" for number in itertools.count())
    return path.rename(next(free for free in map(path.with_name, names) if not free.exists()))


def _best(metrics: Mapping[Path, Mapping[str, float]], metric: str, greater: bool | None) -> Path | None:
    """The checkpoint with the best value of a metric. If several checkpoints have it, the earliest is returned."""
    if greater is None:
        greater = metric.startswith("eval/exact_match") or metric.endswith(("/agreement", "prompts/reward"))
    sign = -1.0 if greater else 1.0
    ranked = [(sign * values[metric], path) for path, values in metrics.items() if metric in values]
    return min(ranked)[1] if ranked else None


def _evaluations(paths: list[Path]) -> tuple[dict[Path, dict[str, float]], list[str]]:
    metrics: dict[Path, dict[str, float]] = {}
    damage: list[str] = []
    for path in paths:
        try:
            metrics[path] = read_state(path).progress.metrics
        except DamagedCheckpointError as error:
            damage.append(str(error))
    return metrics, damage


@dataclass(frozen=True)
class IntactCheckpoint:
    """A checkpoint whose files `verified` has read and found unchanged."""

    path: Path
    state: State


def verified(
    path: Path, ranks: Ranks = ONE_PROCESS, *, shared: bool = True, with_student: bool = False
) -> IntactCheckpoint:
    """Read and hash a checkpoint. Each rank reads its share of the files; all ranks return, or all ranks raise.

    shared: whether all ranks see the same folder; if not, the ranks of each machine read all files of its folder.
    with_student: whether the folder `student`, which a resumed run does not read, is checked, too.
    Raises DamagedCheckpointError for damage, and ValueError if a rank cannot read the files (they may be intact).
    """
    state = _on_all_ranks(lambda: read_state(path), ranks)
    if len(set(ranks.gather(json.dumps(asdict(state), sort_keys=True)))) > 1:
        raise DamagedCheckpointError(f"{path} is not the same for all ranks: they read different files {STATE}")
    _on_all_ranks(
        lambda: _require_files(path, state, ranks, shared, ("",) if with_student else _READ_TO_RESUME), ranks
    )
    _on_all_ranks(lambda: require_covered(path, stored_tensors(path / RESUME)), ranks)
    return IntactCheckpoint(path, state)


def _on_all_ranks(read: Callable[[], Content], ranks: Ranks) -> Content:
    with ranks.all_raise(DamagedCheckpointError, ValueError):
        try:
            content = read()
        except OSError as error:
            raise ValueError(f"a checkpoint cannot be read: {error}") from error
    return content


def _require_files(path: Path, state: State, ranks: Ranks, shared: bool, prefixes: tuple[str, ...]) -> None:
    """Raise DamagedCheckpointError for a file with one of these prefixes that is lost or changed, and for a
    safetensors file without a hash in state.json, because it would be loaded, too.
    """
    expected = {name: value for name, value in state.files.items() if name.startswith(prefixes)}
    there = {name for name in file_names(path) if name.startswith(prefixes) and name != STATE}
    damage = [f"{name} is lost" for name in expected.keys() - there]
    foreign = (name for name in there - expected.keys() if name.endswith(".safetensors"))
    damage += [f"{name} does not belong to it" for name in foreign]
    names = sorted(expected)
    share = ranks.share(names) if shared else names[local_rank() :: local_processes()]
    actual = hashes(path, [name for name in share if name in there])
    damage += [
        f"{name} is not what was written (its hash differs)" for name in actual if actual[name] != expected[name]
    ]
    if not expected:
        damage.append(f"it has no files in {RESUME}")
    if damage:
        more = f", and {len(damage) - _NAMED} more" if len(damage) > _NAMED else ""
        raise DamagedCheckpointError(f"{path} is damaged: {', '.join(sorted(damage)[:_NAMED])}{more}")


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
    """Whether two chunks have a common element. A sweep along the dim with the most distinct offsets finds it."""
    chunks = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if along is None:
        return True  # two chunks of one scalar
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
