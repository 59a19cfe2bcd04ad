"""Verifies that a checkpoint is unchanged and complete: every file by its hash, every tensor by its chunks.

PyTorch does not notice that the file of one rank is lost: the shards of that rank would keep their initial values.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from stillhouse.engine.state_folder import stored_tensors
from stillhouse.output.disk import file_names, hashes
from stillhouse.output.progress import STATE, DamagedCheckpointError, State, read_state
from stillhouse.parallel import ONE_PROCESS, Ranks, local_processes, local_rank

#: the subfolder of a checkpoint that contains the weights and the optimizer's state
RESUME = "resume"
#: the file with the samples of an on-policy run that are not trained yet (`rollouts_file.py`)
ROLLOUTS = "rollouts.safetensors"
_READ_TO_RESUME = (f"{RESUME}/", ROLLOUTS)
_NAMED = 3

Content = TypeVar("Content")


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
    with_student: whether the folder `student` is checked, too. A resumed run does not read that folder.

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
    """Call `read` and return its result. If `read` raises on one rank, all ranks raise that error."""
    with ranks.all_raise(DamagedCheckpointError, ValueError):
        try:
            content = read()
        except OSError as error:
            raise ValueError(f"a checkpoint cannot be read: {error}") from error
    return content


def _require_files(path: Path, state: State, ranks: Ranks, shared: bool, prefixes: tuple[str, ...]) -> None:
    """Compare the files whose names begin with one of `prefixes` with their hashes in state.json.

    Raises DamagedCheckpointError for a file that is lost or changed, and for a safetensors file without a hash in
    state.json, because it would be loaded, too.
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
