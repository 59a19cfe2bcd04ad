"""Kernels on fake tensors: a kernel is one operation that computes nothing.

A run on fake tensors (torch's FakeTensorMode) counts the kernels, the bytes and the memory of a GPU that may not be
there. Neither Triton nor torch.compile can run their kernels on such tensors. In their place,
`torch.ops.stillhouse.kernel` is called once for each kernel, with the tensors that it reads and writes, so that a
dispatch mode sees one launch. `ANSWERS` are those of a dry run in place of the objective's kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from stillhouse.objective.numerics import is_readable
from stillhouse.objective.tile.compiled import as_one_kernel, tensors_of
from stillhouse.objective.tile.kernels import are_proven, launch


@torch.library.custom_op("stillhouse::kernel", mutates_args=["written"])
def fake_kernel(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand in for one launch of a kernel. A tensor that the kernel reads and overwrites is in `written` alone."""
    raise NotImplementedError(
        f"the kernel {name} on real tensors: expected fake tensors, of which nothing is computed"
    )


@fake_kernel.register_fake
def _(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    return None


def call_as_one_kernel(
    function: Callable[..., Any], plan: Any, *arguments: Any, partly: Sequence[Tensor] = ()
) -> Any:
    """Return the results of function(plan, *arguments): fake tensors, allocated here and written by one kernel.

    arguments: fake tensors and lists of them. partly: those of which it reads a few columns only, so that they are
    not among the tensors that the kernel reads.
    """
    tensors = tensors_of(arguments)
    shapes = [_mapped(Tensor, _Shape.of, tuple(entry) if isinstance(entry, list) else entry) for entry in arguments]
    result, is_written = _on_meta(function, plan, tuple(shapes))
    read = [tensor for tensor, written in zip(tensors, is_written, strict=True) if not written]
    read = [tensor for tensor in read if all(tensor is not other for other in partly)]
    written = [tensor for tensor, written in zip(tensors, is_written, strict=True) if written]

    def allocated(shape: _Shape) -> Tensor:
        written.append(shape.empty(tensors[0].device))
        return written[-1]

    result = _mapped(_Shape, allocated, result)
    fake_kernel(function.__name__, read, written)
    return result


@dataclass(frozen=True)
class _Shape:
    """What `torch.empty_strided` needs of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_Shape":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device | str) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@cache
def _on_meta(function: Callable[..., Any], plan: Any, shapes: tuple[Any, ...]) -> tuple[Any, list[bool]]:
    """Return the function's results with a `_Shape` for each tensor, and which of its arguments it overwrites.

    shapes: of its arguments; those of a list are a tuple. The function is called once for all arguments of these
    shapes, as a compiled one is traced once.
    """
    # without the dispatch modes, its operations are neither fake nor counted as kernels of the GPU;
    # inference tensors do not count how often they were written
    with _disable_current_modes(), torch.inference_mode(False):
        arguments = [
            [shape.empty("meta") for shape in entry] if isinstance(entry, tuple) else entry.empty("meta")
            for entry in shapes
        ]
        copies = tensors_of(arguments)
        versions = [copy._version for copy in copies]
        result = _mapped(Tensor, _Shape.of, function(plan, *arguments))
        return result, [copy._version > version for copy, version in zip(copies, versions, strict=True)]


def _mapped(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return the value with every object of a kind in it changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(kind, change, entry) for entry in value)
    if isinstance(value, dict):
        return {key: _mapped(kind, change, entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: _mapped(kind, change, getattr(value, field.name)) for field in fields(value)}
        return replace(value, **changed)
    return value


def _launch(
    name: str, grid: tuple[int, int], read: Sequence[Tensor], written: Tensor, *arguments: Any, **constants: Any
) -> None:
    fake_kernel(name, [tensor for tensor in read if tensor is not written], [written])


#: for `dry_run`. Nothing is computed, so there is nothing that a proof of kernels could find wrong
ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    is_readable: lambda tensor: False,
    as_one_kernel: call_as_one_kernel,
    are_proven: lambda *arguments: True,
    launch: _launch,
}
