"""Time and memory of a loss, forward and backward, with the gradients of the student's hidden states and weight.

Time: everyone takes turns in one process, the order turned round every other time, so that a change of the machine's
speed meets all of them.

Memory: peak extra bytes over one pass, beside the inputs and beside the gradients that it leaves in the leaves.
On a GPU the allocator knows. On a CPU it is the peak of resident memory (VmHWM) of a process of its own, after a pass
that has loaded and compiled what is needed. That counts every byte whoever asked for it: compiled kernels, BLAS and
C++ temporaries, which a count of PyTorch's own allocations does not see. glibc is told to map each larger block by
itself, so that what is freed is really given back and cannot stand ready, uncounted, for the pass that is measured.
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

#: of the pass before the one whose memory is read
WARM_UP_TOKENS = 2048
#: glibc: blocks from this size on are mapped each by itself, whatever was freed before
MAP_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def run_pass(loss: Loss, inputs: Inputs) -> torch.Tensor:
    """Forward and backward, without the gradients of the pass before; the loss."""
    inputs.clear_gradients()
    value = loss(inputs)
    value.backward()
    return value.detach()


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds until the device is done, and what the work gave."""
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
    """Each one's seconds, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        names = list(tasks) if turn % 2 == 0 else list(reversed(tasks))
        for name in names:
            seconds[name].append(timed(tasks[name], device)[0])
    return seconds


def extra_bytes(case: str, contestant: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> int:
    """Peak extra memory of one pass, as the head of this file says."""
    if device.type == "cuda":
        return _allocated(case, contestant, sizes, device, dtype)
    threads = torch.get_num_threads()
    return in_fresh_process(_resident, case, contestant, sizes, dtype, threads, environment=MAP_BLOCKS)


def in_fresh_process(function: Callable[..., Any], *arguments: Any, environment: dict[str, str]) -> Any:
    """What a function of a module gives in a new Python, started under these environment variables."""
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
    """Of this process, which has run a pass before, under `MAP_BLOCKS`."""
    inputs.clear_gradients()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    run_pass(loss, inputs)
    return _resident_bytes("VmHWM") - before - gradient_bytes(inputs)


def gradient_bytes(inputs: Inputs) -> int:
    return sum(gradient.nbytes for gradient in inputs.gradients())


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith(field))
    return int(kibibytes) << 10
