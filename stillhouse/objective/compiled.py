"""Pointwise functions as one kernel each: `torch.compile` where it pays and works, plain PyTorch elsewhere.

Both give the same numbers but for rounding. Compiling takes seconds, once for a plan and a number of columns (torch
keeps the result on disk for later processes); small vocabularies are not worth it. TORCH_COMPILE_DISABLE=1 turns it
off.
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

from stillhouse.objective.plan import Plan

#: columns of a tile from which on a compiled function is worth its seconds
COMPILED_FROM = 2048

#: torch's limits of work and reads, beyond which it stores an intermediate tile that two sums need; doing the work
#: twice, in registers, is faster
STORED_FROM = ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold")

_plans = count()

#: devices without a working compiler, found out by trying
_without_compiler: set[str] = set()


def pointwise(function: Callable[..., Any], plan: Plan, tiles_BV: list[Tensor], *rest: Any) -> Any:
    """function(plan, tiles_BV, *rest), compiled where that pays."""
    rows, columns = tiles_BV[0].shape
    device = tiles_BV[0].device.type
    # one row would be compiled for itself: torch takes a size of 1 for a constant
    if columns < COMPILED_FROM or rows < 2 or device in _without_compiler or _is_off():
        return function(plan, tiles_BV, *rest)
    for each in (*tiles_BV, *rest):
        for tensor in each if isinstance(each, list) else [each]:
            torch._dynamo.mark_dynamic(tensor, 0)
    try:
        return _compiled(function, plan, columns)(tiles_BV, *rest)
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:  # OSError: a cache that cannot be written
        _without_compiler.add(device)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"torch.compile does not work for {device} here: the objective's work beside its matrix products takes "
            f"several times as long, with the same results ({reason})",
            stacklevel=2,
        )
        return function(plan, tiles_BV, *rest)


def _is_off() -> bool:
    # torch compiles nothing under a dispatch mode (a counter of operations), and would never again try that function
    return torch._dynamo.config.disable or is_in_torch_dispatch_mode(include_infra_modes=False)


@cache
def _compiled(function: Callable[..., Any], plan: Plan, columns: int) -> Callable[..., Any]:
    def of_plan(tiles_BV: list[Tensor], *rest: Any) -> Any:
        return function(plan, tiles_BV, *rest)

    # with a code object of its own, since torch counts compilations by code and gives up after a few; and with a name
    # of its own, since by that torch remembers numbers that differed and makes variables of them
    own = of_plan.__code__.replace(co_name=f"{function.__name__}_of_plan_{next(_plans)}")
    return torch.compile(
        types.FunctionType(own, of_plan.__globals__, closure=of_plan.__closure__),
        fullgraph=True,
        options=dict.fromkeys(STORED_FROM, 1000),
    )
