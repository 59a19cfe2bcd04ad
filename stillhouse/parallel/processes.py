"""This process of a job: its rank and device, and the connection of all processes that torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from stillhouse.display import print_escaped
from stillhouse.parallel import watchdog

CPU = torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: the minimum timeout of a collective in seconds. It is long, because all ranks wait in a collective while rank 0
#: writes a large model, which can take hours. The watchdog finds hung ranks earlier
GROUP_SECONDS = 6 * 3600.0


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Return the rank of this process among the processes of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """Return the number of processes that torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def process_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def is_first() -> bool:
    """Whether this is rank 0 of the job, which writes the files and prints the messages."""
    return process_rank() == 0


def log_rank0(line: str) -> None:
    """Print a line on rank 0 only. Control characters are escaped, because a line can quote a server or a file."""
    if is_first():
        print_escaped(line)


def connect_processes(device: torch.device, timeout: float) -> None:
    """Connect to the other processes that torchrun started.

    timeout: a rank without a heartbeat for this number of seconds counts as hung.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, processes = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's store survives a restart and still has the addresses of dead processes (torch 2.13), so each
            # attempt uses another prefix. On several machines, the processes can have different restart counts.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        watchdog.watch_ranks(store, rank, processes, timeout)
        limit = timedelta(seconds=max(2 * timeout, GROUP_SECONDS))
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=processes, timeout=limit)


def start_alone(device: torch.device) -> None:
    """Create a process group that has only this process, for a library that needs a group."""
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], store=dist.HashStore(), rank=0, world_size=1)


def wait_for_all() -> None:
    """Wait until all processes of the job have called this function."""
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def temporary_groups(device: torch.device = CPU) -> Iterator[None]:
    """Destroy the process groups that the block creates.

    A group that is not destroyed keeps threads (gloo) or memory of the GPU (NCCL). When the block ends, all work with
    these groups must be complete.

    device: the device on which the block computes.
    """
    before = set(_world.pg_map)
    yield
    wait_for_all()
    for group in [group for group in _world.pg_map if group not in before]:  # in the order of their creation
        dist.destroy_process_group(group)
    # DTensor caches meshes in each thread, so it would use the destroyed groups for a later mesh of the same ranks.
    # Backward passes on a GPU run in a separate thread, whose cache the hook clears
    _clear_sharding_prop_cache()
    ended = torch.zeros((), device=device, requires_grad=True)
    ended.register_hook(lambda _: _clear_sharding_prop_cache())
    ended.backward()


def destroy_process_group() -> None:
    """Wait until all processes of the job have called this function, then disconnect from them."""
    if dist.is_initialized():
        dist.barrier()
        watchdog.stop()
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """Return the device with this name: auto, cpu, mps, cuda or cuda:N.

    "auto" is a CUDA device, else Apple's GPU (MPS, for a single process), else the CPU. Raises ValueError for a
    device that this machine does not have, or that several processes cannot share.
    """
    if name == "auto":
        has_mps = torch.backends.mps.is_available() and process_count() == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    device, processes = torch.device(name), process_count()
    if device.type == "mps" and processes > 1:
        raise ValueError(f"got mps for {processes} processes, which cannot share it: expected cpu, or one process")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("got mps, but this machine has no Apple GPU: expected auto or cpu")
    if device.type != "cuda":
        return device
    if processes > 1 and device.index not in (None, local_rank()):
        expected = "expected cuda, which gives each process its own GPU"
        raise ValueError(f"got {name} for {processes} processes: {expected}")
    if device.index is None:
        device = torch.device("cuda", local_rank())
    if device.index >= (count := torch.cuda.device_count()):
        raise ValueError(f"got {name}, but this machine has {count} CUDA devices: expected auto or cpu")
    # compute the float32 convolutions of vision towers in full precision; by default, torch rounds them to TF32
    torch.backends.cudnn.allow_tf32 = False
    return device


def best_precision(device: torch.device) -> str:
    """Return the precision that `auto` means: bf16 on GPUs that compute bf16 in hardware, else fp32."""
    has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16" if has_units else "fp32"


def use_deterministic_algorithms() -> None:
    """Make torch use deterministic algorithms, and raise an error for an operation that has none."""
    # torch requires this variable, and cuBLAS reads it before its first matrix product
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
