"""The processes that torchrun started, as a run's mesh, and what they tell each other beside tensors."""

import json
import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from stillhouse.config import ConfigError, ParallelConfig
from stillhouse.parallel import watchdog
from stillhouse.parallel.mesh import Degrees, Mesh
from stillhouse.parallel.runner import Layout

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
#: that a collective waits at least: rank 0 may write a large model for hours; what hangs is the watchdog's to find
GROUP_SECONDS = 6 * 3600.0


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_processes() -> int:
    """How many processes torchrun started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def log_rank0(line: str) -> None:
    """Print a line once for all ranks."""
    if is_first():
        print(line, flush=True)


def layout_of(config: ParallelConfig, processes: int, key: str = "parallel") -> Layout:
    """The layout over a number of processes. key: of its section. Raises ConfigError where the degrees do not make
    that number.
    """
    others = {name: getattr(config, name) for name in ("tensor", "pipeline", "context", "replicate")}
    product = math.prod(others.values())
    fsdp = config.fsdp if config.fsdp is not None else max(1, processes // product)
    degrees = Degrees(fsdp=fsdp, expert=config.expert, **others)
    if degrees.processes != processes:
        started = f"torchrun started {processes}" if processes > 1 else "there is one, without torchrun"
        raise ConfigError(
            key,
            f"{degrees} makes {degrees.processes} processes, and {started}: expected "
            f"torchrun --nproc-per-node {degrees.processes}, or degrees whose product is {processes}",
        )
    sharing = degrees.shard * degrees.tensor
    if degrees.experts % degrees.tensor or sharing % degrees.experts:
        raise ConfigError(
            f"{key}.expert",
            f"got {config.expert}, with fsdp × context × tensor = {sharing} and tensor = {degrees.tensor}: expected "
            "a divisor of the first and a multiple of the second",
        )
    gather_dtype = None if config.gather_dtype is None else torch.bfloat16
    return Layout(degrees, config.schedule, gather_dtype, config.offload)


def require_sharing(layout: Layout, device: torch.device) -> None:
    """Raise ConfigError for an offload without a place to take from, and for what FSDP does where it is not."""
    if layout.offload and device.type == "cpu":
        raise ConfigError(
            "parallel.offload",
            "got true on device cpu, whose memory holds everything already: expected false, or a GPU",
        )
    if layout.degrees.replicate * layout.degrees.shard > 1:
        return
    for key in ("offload", "gather_dtype"):
        if getattr(layout, key):
            raise ConfigError(
                f"parallel.{key}",
                f"set under {layout}: expected parallel.fsdp, replicate or context above 1, whose shards it is about",
            )


def start(device: torch.device, timeout: float) -> None:
    """Meet the other processes that torchrun started. timeout: seconds after which a rank counts as hung."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        store, rank, processes = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # torchrun's own store outlives its restarts, with the addresses of dead processes in it (torch 2.13);
            # only on one machine do all agree on how many there were
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        watchdog.start(store, rank, processes, timeout)
        # a rank that hangs is the watchdog's to find: what a collective waits for may also be a long save on rank 0
        limit = timedelta(seconds=max(2 * timeout, GROUP_SECONDS))
        dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=processes, timeout=limit)


def join(layout: Layout, device: torch.device, timeout: float) -> Mesh | None:
    """The mesh of a layout, after all of its processes have met; None for a process alone."""
    if layout.degrees.processes == 1:
        return None
    start(device, timeout)
    return Mesh(layout.degrees, device)


def leave() -> None:
    """Part from the other processes, after all of them are done."""
    if dist.is_initialized():
        dist.barrier()
        watchdog.stop()
        dist.destroy_process_group()


def gathered(value: Any, group: ProcessGroup | None, device: torch.device) -> list[Any]:
    """What every process of a group gives, in the order of ranks; anything that JSON can hold."""
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
