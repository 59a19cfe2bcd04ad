"""A run's state as a folder: the student's weights, the optimizer's moments and the random generators' states.

    student.<parameter>                   a weight or a buffer
    optimizer.state.<parameter>.<moment>  the optimizer's state, such as a moment of AdamW
    average.<parameter>                   the exponential moving average of a trained weight, if the run has one
    random.<device>.<rank>                a random generator's state; the name has no rank in a run of one process

The files have the safetensors format of PyTorch's distributed checkpoints (DCP).
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from stillhouse.output.progress import DamagedCheckpointError
from stillhouse.parallel import Ranks

#: prefixes of the names of tensors
WEIGHT = "student."
RANDOM = "random."
MOMENT = "optimizer.state."
AVERAGE = "average."
#: the end of the names of Muon's moments
MUONS = ".momentum_buffer"


def write_tensors(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    """Write tensors, which may be shards, to a folder that all ranks share."""
    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with without_distributed_warning():
        dcp.save(tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)


def read_in_place(folder: Path, tensors: dict[str, Any]) -> None:
    """Read tensors in place from a folder of safetensors files; each tensor may be a shard."""
    with without_distributed_warning():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(path=str(folder)), no_dist=True)


@contextmanager
def without_distributed_warning() -> Iterator[None]:
    with warnings.catch_warnings():  # torch warns about no_dist=True, which is intended
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_full(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read unsharded tensors by name from a folder of safetensors files into host memory."""
    stored = stored_tensors(folder)
    tensors = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
    read_in_place(folder, tensors)
    return tensors


def require_fit(
    path: Path, stored: Mapping[str, TensorStorageMetadata], wanted: Mapping[str, Any], is_complete: bool
) -> None:
    """Raise ValueError with a tensor's name if the tensors of a checkpoint do not fit the student.

    DCP's own check ignores superfluous tensors, and its error is not an `Exception`. A run without an average ignores
    the checkpoint's average.

    path: the checkpoint. stored: its tensors. wanted: the tensors that this process will load.
    is_complete: whether this process has the full student, so that a stored tensor that is not wanted is an error.
    """
    shapes = {name: tuple(entry.size) for name, entry in stored.items()}
    expected = {name: tuple(value.shape) for name, value in wanted.items()}
    has_average = any(name.startswith(AVERAGE) for name in expected)
    kinds = (WEIGHT, MOMENT, AVERAGE) if has_average else (WEIGHT, MOMENT)
    for name in sorted(shapes.keys() | expected.keys() if is_complete else expected.keys()):
        there, here = (f"of shape {sizes[name]}" if name in sizes else "absent" for sizes in (shapes, expected))
        if there == here or not name.startswith(kinds):
            continue
        remedy = (
            "expected the student, the train.optimizer and the section objective of the run that wrote the "
            "checkpoint (some losses in objective have trained weights of their own)"
        )
        # whether the checkpoint and the run both use Muon, but only one of them uses it for this weight
        muons = f"{name.rpartition('.')[0]}{MUONS}"
        both = any(other.endswith(MUONS) and other in expected for other in shapes)
        if name.startswith(MOMENT) and both and (muons in shapes) != (muons in expected):
            remedy = (
                "the version that wrote the checkpoint applied Muon to all weights with two dims, and this version "
                "does not apply it to biases of experts and norms of heads; begin a new run with the checkpoint's "
                f"weights: stillhouse export {path} --out FOLDER, then student.model=FOLDER"
            )
        difference = f"'{name}' is {there} in the checkpoint and {here} in the run"
        raise ValueError(f"{path} does not fit this student: {difference}; {remedy}")


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the shapes, dtypes and chunks of a state's tensors. Raises DamagedCheckpointError for damaged files."""
    try:
        stored = dcp.HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpointError(f"{folder.parent} is damaged: {error}") from error
    return {name: value for name, value in stored.items() if isinstance(value, TensorStorageMetadata)}
