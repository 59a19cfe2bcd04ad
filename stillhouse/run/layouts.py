"""Makes a layout from a section `parallel` of the configuration."""

import math

import torch

from stillhouse.config import ConfigError, ParallelConfig
from stillhouse.parallel import Degrees, Layout


def layout_of(config: ParallelConfig, processes: int, key: str = "parallel") -> Layout:
    """The layout for this number of processes. key: the name of the configuration's section, for errors.

    Raises ConfigError if the product of the degrees is not that number, or if the expert degree does not fit the
    other degrees.
    """
    others = {name: getattr(config, name) for name in ("tensor", "pipeline", "context", "replicate")}
    product = math.prod(others.values())
    fsdp = config.fsdp if config.fsdp is not None else max(1, processes // product)
    degrees = Degrees(fsdp=fsdp, expert=config.expert, **others)
    if degrees.processes != processes:
        started = f"torchrun started {processes}" if processes > 1 else "there is one, without torchrun"
        raise ConfigError(
            key,
            f"{degrees} needs {degrees.processes} processes, but {started}: expected "
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
    """Raise ConfigError for an offload on a CPU, and for an option of FSDP under a layout without FSDP."""
    if layout.offload and device.type == "cpu":
        raise ConfigError(
            "parallel.offload",
            "got true on a CPU, where everything is in host memory already: expected false, or a GPU",
        )
    if layout.degrees.replicate * layout.degrees.shard > 1:
        return
    for key in ("offload", "gather_dtype"):
        if getattr(layout, key):
            raise ConfigError(
                f"parallel.{key}",
                f"has no effect under {layout}, which does not use FSDP: expected parallel.fsdp, replicate or "
                "context above 1",
            )
