"""Runs each function of the tile's pass as few kernels with `torch.compile`, or in plain PyTorch.

Both give the same numbers except for rounding. Plain PyTorch is used if compiling fails, with
TORCH_COMPILE_DISABLE=1, and for small vocabularies, for which compiling costs more time than it saves: seconds for
each plan and number of columns (torch keeps the result on disk for later processes). On fake tensors, a compiled
function is one kernel that computes nothing (`fake_kernels.py`).
"""

import types
import warnings
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stillhouse.objective.tile.fake_kernels import are_fake, call_as_one_kernel
from stillhouse.objective.tile.tile_plan import PointwisePlan

#: functions are compiled if a tile has at least this many columns
COMPILED_FROM = 2048

#: torch's limits for the number of operations and reads. Beyond them, torch stores an intermediate tile in memory if
#: two sums use it; computing it twice in registers is faster
STORED_FROM = ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold")

_plans = count()

#: device types on which compiling has failed
_without_compiler: set[str] = set()


def pointwise(function: Callable[..., Any], plan: PointwisePlan, tiles_BV: list[Tensor], *rest: Any) -> Any:
    """Call function(plan, tiles_BV, *rest), compiled or in plain PyTorch."""
    columns = tiles_BV[0].shape[1]
    if columns < COMPILED_FROM:
        return function(plan, tiles_BV, *rest)
    return _fused(function, plan, columns, 0, tiles_BV, *rest)


def of_rows(function: Callable[..., Any], plan: PointwisePlan, pieces_RCX: Tensor, *rest: Any) -> Any:
    """Call function(plan, pieces_RCX, *rest): on a GPU compiled, because it consists of hundreds of small kernels."""
    if not pieces_RCX.is_cuda:
        return function(plan, pieces_RCX, *rest)
    return _fused(function, plan, len(pieces_RCX), 1, pieces_RCX, *rest)


def _fused(function: Callable[..., Any], plan: PointwisePlan, size: int, dim: int, *arguments: Any) -> Any:
    """size: a size that is a constant of the compiled code. dim: the dimension of the rows, whose number varies."""
    tensors = [tensor for entry in arguments for tensor in (entry if isinstance(entry, list) else [entry])]
    device = tensors[0].device.type
    # torch treats a size of 1 as a constant, so it would compile again for a block of one row
    if tensors[0].shape[dim] < 2 or device in _without_compiler:
        return function(plan, *arguments)
    if are_fake(tensors):
        return call_as_one_kernel(function, plan, *arguments)
    if _is_off():
        return function(plan, *arguments)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)
    try:
        return _compiled(function, plan, size)(*arguments)
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:  # OSError: the cache is not writable
        _without_compiler.add(device)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"torch.compile does not work for {device} here: the objective's work beside its matrix products takes "
            f"several times as long, with the same results ({reason})",
            stacklevel=2,
        )
        return function(plan, *arguments)


def _is_off() -> bool:
    # under a dispatch mode (such as an operation counter), torch compiles nothing and never retries the function
    return torch._dynamo.config.disable or is_in_torch_dispatch_mode(include_infra_modes=False)


@cache
def _compiled(function: Callable[..., Any], plan: PointwisePlan, size: int) -> Callable[..., Any]:
    def of_plan(*arguments: Any) -> Any:
        return function(plan, *arguments)

    # Each plan gets its own code object, because torch counts compilations per code object and gives up after a few.
    # It also gets its own name, because torch records by name which numbers differ between calls, and turns those
    # numbers into variables.
    code = of_plan.__code__.replace(co_name=f"{function.__name__}_of_plan_{next(_plans)}")
    return torch.compile(
        types.FunctionType(code, of_plan.__globals__, closure=of_plan.__closure__),
        fullgraph=True,
        options=dict.fromkeys(STORED_FROM, 1000),
    )
