"""Imitates a CUDA device without a GPU, for fake tensors: replaces kernels, and torch's calls of the driver.

All changes to torch that a dry run needs are in this file, with their reasons; `child.py` loads the part in C++. In
place of each kernel of Triton or torch.compile, `torch.ops.stillhouse.kernel` is called with the tensors that the
kernel reads and writes, so that a dispatch mode sees one launch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import _utils as tensor_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from stillhouse.dry_run import dry_run
from stillhouse.objective.numerics import is_readable
from stillhouse.objective.tile.compiled import as_one_kernel, tensors_of
from stillhouse.objective.tile.kernels import are_proven, launch

_DEVICES = 8
_DATA: Any = Tensor.data
_SHAPES = "_propagate_tensor_meta_non_cached"
_OFFSETS = "_compute_local_shape_and_global_offset"


class FakeCudaMode(FakeTensorMode):
    """Makes every new tensor fake. Without the attribute below, torch would move constants to the missing device."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


@contextmanager
def fake_cuda(properties: SimpleNamespace) -> Iterator[None]:
    """Within the block, `torch.cuda` describes devices with these properties. Nothing runs on them.

    properties: the result of `torch.cuda.get_device_properties`.
    """
    with ExitStack() as stack:
        stack.enter_context(dry_run(ANSWERS))
        for owner, name, replacement in _replacements(properties):
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, replacement)
        yield


def _replacements(properties: SimpleNamespace) -> list[tuple[Any, str, Any]]:
    """Return replacements for functions of torch that ask the driver, or read values, which fake tensors lack."""
    capability = (properties.major, properties.minor)
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: _DEVICES,
        "set_device": _nothing,
        "synchronize": _nothing,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda including_emulation=True: True,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _Stream(),
        "stream": lambda stream: nullcontext(),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
        "reset_peak_memory_stats": _nothing,
        "empty_cache": _nothing,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: random_state,
        "set_rng_state": _nothing,
    }
    real = unset_fake_temporarily()
    replacements: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, answer) for name, answer in answers.items()),
        # packages for CUDA look for this function when they are imported
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        # a fake tensor keeps its device in an attribute, which must follow an assignment of `data`
        (FakeTensor, "data", property(_DATA.__get__, _set_data)),
        # torch.autocast and the gradient scaler ask whether CUDA exists in this build of torch
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        # these functions create small tensors of rank numbers, compute with them, and read the results
        (tensor_utils, _OFFSETS, real(getattr(tensor_utils, _OFFSETS))),
        (DeviceMesh, "_concatenate", staticmethod(real(DeviceMesh._concatenate))),
        (DeviceMesh, "__getitem__", real(DeviceMesh.__getitem__)),
        # this method computes shapes by calling an operation once on full tensors, which would count as a kernel
        (ShardingPropagator, _SHAPES, real(getattr(ShardingPropagator, _SHAPES))),
        # the original starts the device for the first fake tensor
        (fake_tensor, "init_gpu_context", _nothing),
        # the original reads each number of a tensor separately, and each read would count as a wait
        (FakeTensor, "tolist", _list),
    ]
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # from torch 2.12 on
        # the stages ask each other whether they need gradients; in a training step they do
        replacements.append((schedules._PipelineSchedule, "_warmup_p2p", _stages_with_gradients))
    return replacements


def _set_data(tensor: Any, data: Any) -> None:
    _DATA.__set__(tensor, data)
    tensor.fake_device = data.fake_device


def _stages_with_gradients(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def _list(tensor: Tensor) -> Any:
    """Return zeros in the shape of the tensor, after one copy to the host.

    For the numbers of tokens that transformers sends to the experts of other processes, return equal shares instead.
    """
    host, value = tensor.cpu(), 0
    caller = sys._getframe(1)
    if caller.f_code.co_name == "_dispatch_tokens":
        value = caller.f_locals["expert_ids"].numel() // host.shape[-1]
    with unset_fake_temporarily():
        numbers: Any = torch.full(host.shape, value, dtype=host.dtype).tolist()
    return numbers


def _nothing(*arguments: Any, **options: Any) -> None: ...


class _Event(torch.cpu.Event):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__()

    def query(self) -> bool:
        return True

    record = synchronize = wait = _nothing


class _Stream(torch.cpu.Stream):
    device = torch.device("cuda", 0)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    wait_event = wait_stream = synchronize = _nothing


@torch.library.custom_op("stillhouse::kernel", mutates_args=["written"])
def fake_kernel(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Stand in for one launch of a kernel. A tensor that the kernel reads and overwrites is only in `written`."""
    raise NotImplementedError(
        f"the kernel {name} on real tensors: expected fake tensors, because nothing is computed"
    )


fake_kernel.register_fake(_nothing)


def call_as_one_kernel(
    function: Callable[..., Any], plan: Any, *arguments: Any, partly: Sequence[Tensor] = ()
) -> Any:
    """Return the results of function(plan, *arguments) as fake tensors, allocated here and written by one kernel.

    arguments: fake tensors and lists of fake tensors. partly: the tensors of which the function reads only a few
    columns; the kernel does not count as a reader of these tensors.
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
    """The properties of a tensor that `torch.empty_strided` needs."""

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
    """Return the function's results with a `_Shape` for each tensor, and for each argument whether it is overwritten.

    shapes: the shapes of the arguments; a list of tensors has a tuple of shapes.
    """
    # without the dispatch modes, the function's operations are neither fake nor counted as kernels of the GPU;
    # without inference mode, tensors count how often they were written
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
    """Return the value with `change` applied to every object of this kind in it."""
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


#: the replacements for `dry_run`. Kernels count as proven, because nothing is computed
ANSWERS: dict[Callable[..., Any], Callable[..., Any]] = {
    is_readable: lambda tensor: False,
    as_one_kernel: call_as_one_kernel,
    are_proven: lambda *arguments: True,
    launch: lambda name, grid, read, written, *arguments, **constants: fake_kernel(
        name, [tensor for tensor in read if tensor is not written], [written]
    ),
}
