"""Runs each pointwise function as one kernel with `torch.compile`, or in plain PyTorch.

Both give the same numbers except for rounding. Plain PyTorch is used if compiling fails, with
TORCH_COMPILE_DISABLE=1, and for small vocabularies, for which compiling costs more time than it saves: seconds for
each plan and number of columns (torch keeps the result on disk for later processes).
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
    rows, columns = tiles_BV[0].shape
    device = tiles_BV[0].device.type
    # torch treats a size of 1 as a constant, so it would compile again for a block of one row
    if columns < COMPILED_FROM or rows < 2 or device in _without_compiler or _is_off():
        return function(plan, tiles_BV, *rest)
    for argument in (*tiles_BV, *rest):
        for tensor in argument if isinstance(argument, list) else [argument]:
            torch._dynamo.mark_dynamic(tensor, 0)
    try:
        return _compiled(function, plan, columns)(tiles_BV, *rest)
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:  # OSError: the cache is not writable
        _without_compiler.add(device)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"torch.compile does not work for {device} here: the objective's work beside its matrix products takes "
            f"several times as long, with the same results ({reason})",
            stacklevel=2,
        )
        return function(plan, tiles_BV, *rest)


def _is_off() -> bool:
    # under a dispatch mode (such as an operation counter), torch compiles nothing and never retries the function
    return torch._dynamo.config.disable or is_in_torch_dispatch_mode(include_infra_modes=False)


@cache
def _compiled(function: Callable[..., Any], plan: PointwisePlan, columns: int) -> Callable[..., Any]:
    def of_plan(tiles_BV: list[Tensor], *rest: Any) -> Any:
        return function(plan, tiles_BV, *rest)

    # Each plan gets its own code object, because torch counts compilations per code object and gives up after a few.
    # It also gets its own name, because torch records by name which numbers differ between calls, and turns those
    # numbers into variables.
    code = of_plan.__code__.replace(co_name=f"{function.__name__}_of_plan_{next(_plans)}")
    return torch.compile(
        types.FunctionType(code, of_plan.__globals__, closure=of_plan.__closure__),
        fullgraph=True,
        options=dict.fromkeys(STORED_FROM, 1000),
    )
