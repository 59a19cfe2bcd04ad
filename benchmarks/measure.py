"""Measures time and memory of a loss, forward and backward, with gradients of the student's hidden states and weight.

Time: all contestants take turns in one process, and the order is reversed in every second round. So a change of the
machine's speed affects all of them.

Memory: the peak of the bytes that one pass needs beside its inputs and the gradients of the leaves. On a GPU it is
read from the allocator. On a CPU it is the peak of resident memory (VmHWM) of a new process, after a first pass that
has loaded and compiled everything. So memory of compiled kernels, BLAS and C++ temporaries counts too, which
PyTorch's allocator does not see. glibc is set to map each larger block separately: freed memory then returns to the
system, and the measured pass cannot reuse it without being counted.
"""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import CASES, Inputs, Loss, Sizes, contestants, make_inputs

#: tokens of the first pass, before the measured one
WARM_UP_TOKENS = 2048
#: glibc's setting: blocks of this size or larger are mapped separately
MAP_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def run_pass(loss: Loss, inputs: Inputs) -> torch.Tensor:
    """Clear the gradients, run forward and backward, and return the loss."""
    inputs.clear_gradients()
    value = loss(inputs)
    value.backward()
    return value.detach()


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds until the device has finished the work, and the work's result."""
    synchronize(device)
    started = time.perf_counter()
    result = work()
    synchronize(device)
    return time.perf_counter() - started, result


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.float() - reference.float()).norm() / reference.float().norm())


def take_turns(tasks: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of each task in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        names = list(tasks) if turn % 2 == 0 else list(reversed(tasks))
        for name in names:
            seconds[name].append(timed(tasks[name], device)[0])
    return seconds


def extra_bytes(case: str, contestant: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> int:
    """Return the peak extra memory of one pass; the docstring of this file describes it."""
    if device.type == "cuda":
        return _allocated(case, contestant, sizes, device, dtype)
    threads = torch.get_num_threads()
    return in_fresh_process(_resident, case, contestant, sizes, dtype, threads, environment=MAP_BLOCKS)


def in_fresh_process(function: Callable[..., Any], *arguments: Any, environment: dict[str, str]) -> Any:
    """Call a module's function in a new Python process with these environment variables, and return its result."""
    with (
        changed_environment(environment),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        return pool.submit(function, *arguments).result()


@contextmanager
def changed_environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _allocated(case: str, contestant: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> int:
    loss = contestants(CASES[case], device)[0][contestant]
    inputs = make_inputs(sizes, device, dtype)
    run_pass(loss, inputs)
    inputs.clear_gradients()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_pass(loss, inputs)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - gradient_bytes(inputs)


def _resident(case: str, contestant: str, sizes: Sizes, dtype: torch.dtype, threads: int) -> int:
    torch.set_num_threads(threads)
    cpu = torch.device("cpu")
    loss = contestants(CASES[case], cpu)[0][contestant]
    run_pass(loss, make_inputs(replace(sizes, tokens=min(sizes.tokens, WARM_UP_TOKENS)), cpu, dtype))
    return resident_extra(loss, make_inputs(sizes, cpu, dtype))


def resident_extra(loss: Loss, inputs: Inputs) -> int:
    """Return the extra memory of a pass in this process, which has run a first pass under `MAP_BLOCKS`."""
    inputs.clear_gradients()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # this resets the peak to the resident size
    run_pass(loss, inputs)
    return resident_bytes("VmHWM") - before - gradient_bytes(inputs)


def gradient_bytes(inputs: Inputs) -> int:
    return sum(gradient.nbytes for gradient in inputs.gradients())


def resident_bytes(field: str) -> int:
    """Return this process's resident memory: now (VmRSS), or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(field))
    return int(kibibytes) << 10
