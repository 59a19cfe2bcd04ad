"""Sums, measures and scales a gradient that is distributed over processes."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from stillhouse.models.dtensors import local
from stillhouse.parallel.ranks import Ranks


def reduce_partial_grads(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Sum `Partial` gradients over ranks, so that a gradient has its parameter's placements.

    Returns the parameters that have a gradient.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in held:
        if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return held


def add_up_gradients(parameters: Iterable[nn.Parameter], group: ProcessGroup, device: torch.device) -> None:
    """Replace the gradients of parameters by their sums over a group whose ranks have the same parameters.

    This is one all-reduce in float32 on `device`. The gradients themselves can be in host memory.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    total = torch.cat([gradient.flatten().to(device, torch.float32) for gradient in gradients])
    dist.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def gradient_norm(held: Iterable[nn.Parameter], processes: int, ranks: Ranks) -> Tensor:
    """Return the norm of the global gradient, the same on every process, in float32 and on the gradients' device.

    Each element counts once, even if several processes have copies of it.

    processes: the number of processes with a copy or a shard of each of these parameters. ranks: the ranks of all
        pipeline stages.
    """
    counted = [parameter for parameter in held if parameter.grad is not None]
    if not counted:
        return ranks.sum(torch.zeros(())).sqrt()
    gradients = [local(parameter.grad) for parameter in counted]
    # one kernel for many gradients instead of two kernels per gradient; `_foreach_norm` cannot
    # convert float64 to float32
    if all(gradient.is_cuda and gradient.dtype != torch.float64 for gradient in gradients):
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        squares = list(torch._foreach_mul(norms, norms))
    else:  # on a CPU, `_foreach_norm` sums in another order, which would change the last bits of the results
        squares = [gradient.float().square().sum() for gradient in gradients]
    shares = torch._foreach_div(squares, [float(copies(parameter, processes)) for parameter in counted])
    return ranks.sum(torch.stack(shares).sum()).sqrt()


def copies(parameter: nn.Parameter, processes: int) -> int:
    """Return the number of processes that have the same elements of a parameter."""
    if not isinstance(parameter, DTensor):
        return processes
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return processes // math.prod(size for placement, size in sizes if not placement.is_replicate())


def scale_gradients(held: Iterable[nn.Parameter], factor: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in held:
        if parameter.grad is not None:
            by_dtype[parameter.grad.dtype].append(local(parameter.grad))
    for dtype, gradients in by_dtype.items():
        torch._foreach_mul_(gradients, factor.to(dtype))
