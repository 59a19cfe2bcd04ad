"""Kernels on fake tensors: a kernel is one operation that computes nothing.

A run on fake tensors (torch's FakeTensorMode) counts the kernels, the bytes and the memory of a GPU that may not be
there. Neither Triton nor torch.compile can run their kernels on such tensors. In their place,
`torch.ops.stillhouse.kernel` is called once for each kernel, with the tensors that it reads and writes, so that a
dispatch mode sees one launch.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


@torch.library.custom_op("stillhouse::kernel", mutates_args=["written"])
def fake_kernel(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand in for one launch of a kernel. A tensor that the kernel reads and overwrites is in `written` alone."""
    raise NotImplementedError(
        f"the kernel {name} on real tensors: expected fake tensors, of which nothing is computed"
    )


@fake_kernel.register_fake
def _(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    return None


def are_fake(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in tensors)


def call_as_one_kernel(
    function: Callable[..., Any], plan: Any, *arguments: Any, partly: Sequence[Tensor] = ()
) -> Any:
    """Return the results of function(plan, *arguments): fake tensors, allocated here and written by one kernel.

    arguments: fake tensors and lists of them. partly: those of which it reads a few columns only, so that they are
    not among the tensors that the kernel reads.
    """
    tensors: list[Tensor] = []
    copies: list[Tensor] = []

    def as_meta(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        copies.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))
        return copies[-1]

    # without the dispatch modes, the function's own operations are neither fake nor counted as kernels of the GPU;
    # inference tensors do not count how often they were written
    with _disable_current_modes(), torch.inference_mode(False):
        copied = _mapped(as_meta, arguments)
        versions = [copy._version for copy in copies]
        result = function(plan, *copied)
    is_written = [copy._version > version for copy, version in zip(copies, versions, strict=True)]
    read = [tensor for tensor, written in zip(tensors, is_written, strict=True) if not written]
    read = [tensor for tensor in read if all(tensor is not other for other in partly)]
    written = [tensor for tensor, written in zip(tensors, is_written, strict=True) if written]
    device = tensors[0].device

    def allocated(copy: Tensor) -> Tensor:
        written.append(torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=device))
        return written[-1]

    result = _mapped(allocated, result)
    fake_kernel(function.__name__, read, written)
    return result


def _mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return the value with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(change, entry) for entry in value)
    if isinstance(value, dict):
        return {key: _mapped(change, entry) for key, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(change, getattr(value, field.name)) for field in fields(value)})
    return value
