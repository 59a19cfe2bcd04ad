"""A CUDA device without a GPU: what torch answers about the device while all of its tensors are fake.

All changes to torch that a dry run needs are in this file, with their reasons. `hooks.py` has the part in C++.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import _utils as tensor_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from stillhouse.dry_run import dry_run
from stillhouse.plan import fake_kernels

_DATA: Any = torch.Tensor.data
_SHAPES = "_propagate_tensor_meta_non_cached"
_OFFSETS = "_compute_local_shape_and_global_offset"


class FakeCudaMode(FakeTensorMode):
    """Makes every new tensor fake. Without this property, torch moves constants to the device that is not there."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)


@contextmanager
def fake_cuda(properties: SimpleNamespace, devices: int = 8) -> Iterator[None]:
    """Within the block, `torch.cuda` describes `devices` devices with these properties. Nothing runs on them.

    properties: what `torch.cuda.get_device_properties` returns.
    """
    with ExitStack() as stack:
        stack.enter_context(dry_run(fake_kernels.ANSWERS))
        for name, answer in _answers(properties, devices).items():
            stack.enter_context(_replaced(torch.cuda, name, answer))
        for owner, name, replacement in _replacements():
            stack.enter_context(_replaced(owner, name, replacement))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block, a module or class of torch has this value under a name."""
    exists, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if exists:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _answers(properties: SimpleNamespace, devices: int) -> dict[str, Any]:
    """Functions of `torch.cuda`; each asks the driver otherwise."""
    capability = (properties.major, properties.minor)
    random_state = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: devices,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
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
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: random_state,
        "set_rng_state": lambda *arguments: None,
    }


def _replacements() -> list[tuple[Any, str, Any]]:
    """Functions of torch that ask the driver, or read values of tensors which have none under `FakeTensorMode`."""
    replacements: list[tuple[Any, str, Any]] = [
        # packages for CUDA look for it when they are imported
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        # a fake tensor keeps its device in an attribute, which another `data` would not change
        (FakeTensor, "data", property(_data, _set_data)),
        # torch.autocast and the gradient scaler ask whether CUDA exists in this build of torch
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        # they compute with small tensors of ranks that they make themselves, and read the results
        (tensor_utils, _OFFSETS, with_real_tensors(getattr(tensor_utils, _OFFSETS))),
        (DeviceMesh, "_concatenate", staticmethod(with_real_tensors(DeviceMesh._concatenate))),
        (DeviceMesh, "__getitem__", with_real_tensors(DeviceMesh.__getitem__)),
        # it works out the shapes of an operation by calling it once on full tensors, which would count as kernels
        (ShardingPropagator, _SHAPES, with_real_tensors(getattr(ShardingPropagator, _SHAPES))),
        # the first fake tensor starts the device otherwise
        (fake_tensor, "init_gpu_context", lambda device: None),
        # a list of fake numbers is read one by one otherwise, which would count as many waits as numbers
        (FakeTensor, "tolist", _list),
    ]
    if hasattr(schedules._PipelineSchedule, "_warmup_p2p"):  # from torch 2.12 on
        # the stages exchange whether they need gradients; those of a training step do
        replacements.append((schedules._PipelineSchedule, "_warmup_p2p", _stages_with_gradients))
    return replacements


def with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function outside of `FakeCudaMode`: its tensors have values, and are small or on the meta device."""

    def real(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return real


def _data(tensor: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(tensor)
    return data


def _set_data(tensor: Any, data: Any) -> None:
    _DATA.__set__(tensor, data)
    tensor.fake_device = data.fake_device


def _stages_with_gradients(schedule: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def _list(tensor: torch.Tensor) -> Any:
    """Return zeros in the shape of the tensor, after one copy to the host.

    The numbers of tokens that transformers sends to the experts of other processes are equal instead of 0.
    """
    host, value = tensor.cpu(), 0
    caller = sys._getframe(1)
    if caller.f_code.co_name == "_dispatch_tokens":
        value = caller.f_locals["expert_ids"].numel() // host.shape[-1]
    with unset_fake_temporarily():
        numbers: Any = torch.full(host.shape, value, dtype=host.dtype).tolist()
    return numbers


class _Event(torch.cpu.Event):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__()

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...


class _Stream(torch.cpu.Stream):
    device = torch.device("cuda", 0)

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__()

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...
