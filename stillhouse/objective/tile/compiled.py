"""Runs each function of the tile's pass as few kernels with `torch.compile`, or in plain PyTorch.

The two ways give the same numbers except for rounding. Plain PyTorch is used if compiling fails, with
TORCH_COMPILE_DISABLE=1, and for small vocabularies, for which compiling costs more time than it saves. Compiling
takes seconds for each `PointwisePlan` and number of columns (torch keeps the result on disk for later processes).
"""

import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from stillhouse.dry_run import replaceable
from stillhouse.objective.tile.tile_plan import PointwisePlan

#: functions are compiled if a tile has at least this many columns
COMPILED_FROM = 2048

#: the types of devices on which the work on rows is compiled
ROW_DEVICES = {"cuda"}

#: the names of torch's limits on operations and reads. Above a limit, torch stores an intermediate tile in memory if
#: two sums use it. Computing it twice in registers is faster, so `_compiled` raises all limits
STORED_FROM = ("realize_opcount_threshold", "realize_reads_threshold", "realize_acc_reads_threshold")

_plans = count()

#: (device type, name) of functions that cannot be compiled; all functions that run no term have the name "pointwise"
_without_compiler: set[tuple[str, str]] = set()


def pointwise(function: Callable[..., Any], plan: PointwisePlan, tiles_BV: list[Tensor], *rest: Any) -> Any:
    """Call function(plan, tiles_BV, *rest), compiled or in plain PyTorch."""
    if tiles_BV[0].shape[1] < COMPILED_FROM:
        return function(plan, tiles_BV, *rest)
    return _fused(function, plan, tiles_BV, *rest)


def run_rows(function: Callable[..., Any], plan: Hashable, *arguments: Any, partly: Sequence[Tensor] = ()) -> Any:
    """Call function(plan, *arguments), compiled on a GPU, where it would otherwise be hundreds of small kernels.

    plan: the values on which the function's code depends.
    partly: the tiles of which the function reads only a few columns.
    """
    if tensors_of(arguments)[0].device.type not in ROW_DEVICES:
        return function(plan, *arguments)
    return _fused(function, plan, *arguments, partly=partly)


def traced(
    function: Callable[..., tuple[Tensor, ...]], plan: Hashable, tensors: Sequence[Tensor], partly: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Call `run_rows` for a function that torch.compile cannot read. It runs the function on symbolic tensors."""
    return run_rows(_in_graph(function, plan), None, *tensors, partly=partly)


@cache
def _in_graph(function: Callable[..., Any], plan: Hashable) -> Callable[..., Any]:
    def in_graph(_: None, *tensors: Tensor) -> Any:
        return function(plan, *tensors)

    in_graph.__name__ = function.__name__
    return torch.compiler.allow_in_graph(in_graph)


def tensors_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return all tensors among tensors and lists of them."""
    return [tensor for entry in arguments for tensor in (entry if isinstance(entry, list) else [entry])]


def _fused(function: Callable[..., Any], plan: Any, *arguments: Any, partly: Sequence[Tensor] = ()) -> Any:
    """Call function(plan, *arguments), compiled if possible. The first dim of all tensors is the rows."""
    tensors = tensors_of(arguments)
    # failures are recorded by name: code of terms can fail to compile on a device where all other functions compile
    where = tensors[0].device.type, function.__name__ if plan is None else "pointwise"
    # torch treats a size of 1 as a constant, so it would compile again for a block of one row
    if len(tensors[0]) < 2 or where in _without_compiler:
        return function(plan, *arguments)
    return as_one_kernel(function, plan, *arguments, partly=partly)


@replaceable
def as_one_kernel(function: Callable[..., Any], plan: Any, *arguments: Any, partly: Sequence[Tensor] = ()) -> Any:
    """Call function(plan, *arguments) compiled or, if that fails, in plain PyTorch. partly: for a dry run only."""
    tensors = tensors_of(arguments)
    where = tensors[0].device.type, function.__name__ if plan is None else "pointwise"
    # under a dispatch mode (such as an operation counter), torch would not compile the function, now or later
    if torch._dynamo.config.disable or is_in_torch_dispatch_mode(include_infra_modes=False):
        return function(plan, *arguments)
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    try:
        return _compiled(function, plan, tuple(tuple(tensor.shape[1:]) for tensor in tensors))(*arguments)
    except _failures() as error:
        _without_compiler.add(where)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(
            f"torch.compile failed for the objective's function {where[1]} on {where[0]}: the function runs without "
            f"it, with the same results, and takes several times as long ({reason})",
            stacklevel=2,
        )
        return function(plan, *arguments)


def _failures() -> tuple[type[Exception], ...]:
    """Return torch's exceptions for a failure to compile or to write its cache. Importing them takes seconds."""
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return torch._dynamo.exc.TorchDynamoException, ConstraintViolationError, OSError


@cache
def _compiled(function: Callable[..., Any], plan: Any, sizes: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    """Return the compiled function for a plan and for tensors of these sizes (without the rows)."""

    def planned(*arguments: Any) -> Any:
        return function(plan, *arguments)

    # Each plan gets its own code object, because torch counts compilations per code object and gives up after a few.
    # It also gets its own name, because torch records by name which numbers differ between calls, and turns those
    # numbers into variables.
    code = planned.__code__.replace(co_name=f"{function.__name__}_of_plan_{next(_plans)}")
    return torch.compile(
        types.FunctionType(code, planned.__globals__, closure=planned.__closure__),
        fullgraph=True,
        options=dict.fromkeys(STORED_FROM, 1000),
    )
