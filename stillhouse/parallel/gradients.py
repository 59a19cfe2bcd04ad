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


def local(tensor: Tensor) -> Tensor:
    """What of a tensor is on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters with a gradient, which then lies as its parameter does: open sums over ranks are done."""
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    return held


def gradient_norm(held: Iterable[nn.Parameter], processes: int = 1, group: ProcessGroup | None = None) -> Tensor:
    """The norm over everything, on every process; float32.

    processes: how many hold a copy or a shard of each of these parameters. group: those whose gradients count
    together, all stages of a pipeline; None for this process alone.
    """
    squares = [
        local(parameter.grad).float().square().sum() / copies(parameter, processes)
        for parameter in held
        if parameter.grad is not None
    ]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    if group is not None:
        dist.all_reduce(total, group=group)
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
