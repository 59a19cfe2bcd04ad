"""Connects the processes that torchrun started, builds a run's mesh, and gathers values other than tensors."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from stillhouse.parallel import watchdog
from stillhouse.parallel.layout import Layout
from stillhouse.parallel.mesh import Mesh

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: the shortest timeout of a collective: rank 0 may take hours to write a large model. The watchdog finds hung ranks
#: earlier.
GROUP_SECONDS = 6 * 3600.0


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """How many processes torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def process_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def log_rank0(line: str) -> None:
    """Print a line once for all ranks."""
    if is_first():
        print(line, flush=True)


def start(device: torch.device, timeout: float) -> None:
    """Connect to the other processes that torchrun started.

    timeout: the number of seconds after which the watchdog regards a rank as hung.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, processes = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's store survives a restart and still has the addresses of dead processes (torch 2.13): give
            # each attempt its own prefix. Only on a single machine do all processes have the same restart count.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        watchdog.start(store, rank, processes, timeout)
        # the watchdog finds a hung rank; a collective may also wait for a long save on rank 0
        limit = timedelta(seconds=max(2 * timeout, GROUP_SECONDS))
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=processes, timeout=limit)


def join(layout: Layout, device: torch.device, timeout: float) -> Mesh | None:
    """Connect all processes of a layout, and return its mesh; None for a single process."""
    if layout.degrees.processes == 1:
        return None
    start(device, timeout)
    return Mesh(layout.degrees, device)


def wait_for_all() -> None:
    """Wait until all processes of the job have called this."""
    if dist.is_initialized():
        dist.barrier()


def destroy_process_group() -> None:
    """Disconnect from the other processes, after all of them have finished."""
    if dist.is_initialized():
        dist.barrier()
        watchdog.stop()
        dist.destroy_process_group()


def gathered(value: Any, group: ProcessGroup | None, device: torch.device) -> list[Any]:
    """Return the values of all processes of a group, in the order of ranks. value: anything that JSON can hold."""
    if group is None:
        return [value]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    lengths[group.rank()] = len(own)
    dist.all_reduce(lengths, group=group)
    texts = [torch.empty(int(lengths.max()), dtype=torch.uint8, device=device) for _ in range(group.size())]
    padded = torch.zeros_like(texts[0])
    padded[: len(own)] = own
    dist.all_gather(texts, padded, group=group)
    return [
        json.loads(bytes(text[:length].tolist()).decode())
        for text, length in zip(texts, lengths.tolist(), strict=True)
    ]


def from_all_ranks(value: Any, device: torch.device) -> list[Any]:
    """Gather the value of every rank of the job, in the order of ranks. It can be anything that JSON can represent.

    It needs no mesh.
    """
    return gathered(value, dist.group.WORLD if dist.is_initialized() else None, device)


def gathered_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the whole tensor on a device: a collective of the processes that hold shards of it.

    The shards may be in host memory, where the group of the processes cannot gather them.
    """
    here: Any = tensor.to(device)
    if not isinstance(here, DTensor):
        return here
    placements = list(here.placements)
    # FSDP's shards of tensor-parallel shards first; torch would warn of another order
    for axis in sorted(range(len(placements)), key=lambda axis: (type(placements[axis]) is Shard, -axis)):
        placements[axis] = Replicate()
        here = here.redistribute(placements=placements)
    return here.to_local()


@contextmanager
def raised_on_all(kind: type[ValueError], group: ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """If the block raises an error of this kind on any process of a group, raise the first of them on all processes.

    Otherwise the other processes would wait for the one that failed. Leaving the block is a collective of the group.
    """
    problem = ""
    try:
        yield
    except kind as error:
        problem = str(error)
    for raised in gathered(problem, group, device):
        if raised:
            raise kind(raised)


def from_first(value: Any, group: ProcessGroup | None, device: torch.device) -> Any:
    """Return the value of the first process of a group on all of them. value: anything that JSON can hold.

    Other processes may give any value.
    """
    if group is None:
        return value
    is_source = group.rank() == 0
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if is_source else None
    length = torch.tensor([0 if text is None else len(text)], device=device)
    dist.broadcast(length, group=group, group_src=0)
    whole = torch.empty(int(length), dtype=torch.uint8, device=device) if text is None else text.to(device)
    dist.broadcast(whole, group=group, group_src=0)
    return value if is_source else json.loads(whole.cpu().numpy().tobytes())
