"""The norm of a gradient that lies over many processes, and its clipping.

Every number of the gradient counts once, however many processes hold it.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from stillhouse.models.head import local


def settle(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters with a gradient, which then lies as its parameter does: open sums over ranks are done."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    return held


def gradient_norm(
    held: Iterable[nn.Parameter],
    processes: int = 1,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The norm over everything, on every process; float32, where the gradients lie.

    processes: how many hold a copy or a shard of each of these parameters. group: those whose gradients count
    together, all stages of a pipeline; None for this process alone. device: where the group's messages start from;
    the gradients may be in host memory.
    """
    squares = [
        local(parameter.grad).float().square().sum() / copies(parameter, processes)
        for parameter in held
        if parameter.grad is not None
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if group is not None:
        together = total.to(device)
        dist.all_reduce(together, group=group)
        total = together.to(total.device)
    return total.sqrt()


def copies(parameter: nn.Parameter, processes: int) -> int:
    """How many processes hold the same numbers of it."""
    if not isinstance(parameter, DTensor):
        return processes
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return processes // math.prod(size for placement, size in sizes if not placement.is_replicate())


def scale_gradients(held: Iterable[nn.Parameter], factor: Tensor) -> None:
    for parameter in held:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
