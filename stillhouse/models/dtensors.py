"""Functions for tensors that may be sharded over processes (DTensors): a process's shard, and the global tensor.

All functions also accept plain tensors, which every process has completely.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Any) -> Any:
    """Return this process's shard of a DTensor. Any other value is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return, for each dim of a global tensor, the slice of this process's shard."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def set_from_global(tensor: Tensor, values: Tensor) -> None:
    """Copy this process's shard of `values`, a global tensor of the same shape, into `tensor`."""
    local(tensor).copy_(values[shard_slices(tensor)])


def gathered_tensor(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return the global tensor. A collective of the processes that have its shards.

    device: the device on which to gather, by default the tensor's device. Shards in host memory must be gathered on
        the GPU.
    """
    moved: Any = tensor if device is None else tensor.to(device)
    if not isinstance(moved, DTensor):
        return moved
    placements = list(moved.placements)
    # if FSDP has sharded tensor-parallel shards, gather over FSDP's ranks first: torch warns about another order
    for axis in sorted(range(len(placements)), key=lambda axis: (type(placements[axis]) is Shard, -axis)):
        placements[axis] = Replicate()
        moved = moved.redistribute(placements=placements)
    return moved.to_local()


def name_seed(seed: int, name: str) -> int:
    """Return the seed for the tensor of this name. It does not depend on the layout, so that every process computes
    the same random values of the global tensor.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])
