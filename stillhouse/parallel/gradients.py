"""The norm of a gradient that is distributed over many processes, and its clipping.

Each element of the gradient counts once, however many processes hold a copy of it.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from stillhouse.models.dtensors import local
from stillhouse.parallel.ranks import Ranks


def reduce_partial_grads(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have a gradient, after giving each gradient the placements of its parameter.

    This carries out the pending sums over ranks (`Partial` placements).
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    return held


def add_up_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device: torch.device) -> None:
    """Replace the gradients of parameters by their sums over a group: one all-reduce of all of them, in float32.

    The processes of the group have the same parameters, with gradients of the same shapes. device: that of the
    group's all-reduce; the gradients may be in host memory.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    total = torch.cat([gradient.flatten().to(device, torch.float32) for gradient in gradients])
    dist.all_reduce(total, group=group)
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def gradient_norm(held: Iterable[nn.Parameter], processes: int, ranks: Ranks) -> Tensor:
    """Return the norm of the whole gradient, the same on every process, in float32 and on the gradients' device.

    processes: the number of processes that hold a copy or a shard of each of these parameters.
    ranks: the processes, of all pipeline stages, that together hold the whole gradient. The gradients may be in host
        memory.
    """
    squares = [
        local(parameter.grad).float().square().sum() / copies(parameter, processes)
        for parameter in held
        if parameter.grad is not None
    ]
    return ranks.sum(torch.stack(squares).sum() if squares else torch.zeros(())).sqrt()


def copies(parameter: nn.Parameter, processes: int) -> int:
    """Return how many processes hold the same elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return processes
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return processes // math.prod(size for placement, size in sizes if not placement.is_replicate())


def scale_gradients(held: Iterable[nn.Parameter], factor: Tensor) -> None:
    for parameter in held:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor.to(parameter.grad.dtype))
