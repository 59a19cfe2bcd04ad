"""Replaces the CUDA devices that Megatron-Core requests by the CPU, for the tests of Megatron-Core only.

python tests/kit/cuda_is_cpu.py script.py arguments…
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """Tensors that are requested on a CUDA device are created on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return args[0].type().replace("torch.", "torch.cuda.")
        if not options:  # nearly all calls
            return function(*args)
        options = {name: value for name, value in options.items() if name != "pin_memory"}
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            options["device"] = "cpu"
        return function(*args, **options)


class _Event:
    """An event of a device that has completed all its work, and a stream of this device. All are the same."""

    def __init__(self, **_: Any): ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Event)

    def record_event(self) -> "_Event":
        return _Event()

    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def _on_host(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor as the sizes of an exchange between experts; Megatron-Core converts only tensors of a GPU."""
    return value.numpy() if as_numpy and torch.is_tensor(value) else value


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    with ExitStack() as stack:
        # Megatron-Core compiles some functions, which takes each process seconds
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(patch("torch.cuda.synchronize", lambda device=None: None))
        stack.enter_context(patch("torch.cuda.current_device", lambda: torch.device("cpu")))
        for name in ("Stream", "Event", "current_stream"):
            stack.enter_context(patch(f"torch.cuda.{name}", _Event))
        stack.enter_context(patch("torch.cuda.stream", nullcontext))
        # no random state is needed, because there is no dropout
        stack.enter_context(patch.object(get_cuda_rng_tracker(), "fork", nullcontext))
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            stack.enter_context(patch(f"megatron.core.tensor_parallel.random.{name}", lambda *_, **__: None))
        stack.enter_context(patch(f"{MoEAlltoAllTokenDispatcher.__module__}.maybe_move_tensor_to_cpu", _on_host))
        stack.enter_context(_CudaIsCpu())
        yield


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with cuda_is_cpu():
        runpy.run_path(sys.argv[0], run_name="__main__")
