"""One process of the command line: starts `python -m stillhouse` of a source tree and reports what it has needed.

Importing torch and transformers takes longer than these small runs. So a fork server imports them once, and each
process of a run is a fork of it, in which Stillhouse is then imported from the source tree. Nothing of Stillhouse is
named here but the module that the command line runs as. So every version can be measured, whatever its modules are
called. The borders of steps are the optimizer's, through a hook of torch.

The ranks of a layout have the environment that torchrun gives them.
"""

import importlib.util
import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
#: operations of these namespaces that send nothing
LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
#: operations that send pickled objects as bytes; the length of these depends on the digits of numbers in them
OF_OBJECTS = ("allgather_", "broadcast_", "gather_", "scatter_", "send", "recv_")


@dataclass(frozen=True)
class Probes:
    """What is measured in a process, or done to it.

    report: the file of the report. collectives: count them; torch compiles nothing then. kill_after_step: end by
    SIGKILL after this optimizer step; 0: never. gate: see Gate.
    """

    report: Path | None = None
    collectives: bool = False
    kill_after_step: int = 0
    gate: Connection | None = None


@dataclass(frozen=True)
class Job:
    """One process: `stillhouse <arguments>` of a source tree, in `folder`. log: a file for all that it prints."""

    tree: Path
    folder: Path
    arguments: tuple[str, ...]
    log: Path
    environment: dict[str, str]
    threads: int
    probes: Probes = field(default_factory=Probes)


def run_job(job: Job) -> None:
    """Become the process. The exit code is that of the command."""
    prepare(job)
    require_tree(job.tree)
    probes = job.probes
    collectives = Collectives() if probes.collectives else None
    if collectives is not None:
        on_step(collectives.end_step)
    if probes.kill_after_step:
        on_step(StepKiller(probes.kill_after_step))
    if probes.gate is not None:
        on_step(Gate(probes.gate))
    sys.argv = ["stillhouse", *job.arguments]
    try:
        with collectives or nullcontext():
            runpy.run_module("stillhouse", run_name="__main__", alter_sys=True)
    finally:
        if probes.report is not None:
            write_report(probes.report, collectives)


def prepare(job: Job) -> None:
    """Give the fork the state that a new process would have."""
    os.chdir(job.folder)
    os.environ |= job.environment | {"PYTHONPATH": str(job.tree)}
    sys.path[:] = ["", str(job.tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    torch.set_num_threads(job.threads)
    random.seed()
    np.random.seed()


def require_tree(tree: Path) -> None:
    spec = importlib.util.find_spec("stillhouse")
    origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if origin is None or tree.resolve() not in origin.parents:
        raise RuntimeError(f"this process would import stillhouse from {origin}; expected the tree {tree}")


# what happens at the border of a step


def on_step(call: Callable[[], None]) -> None:
    def hook(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        call()

    register_optimizer_step_post_hook(hook)


class StepKiller:
    """Ends the process by SIGKILL after an optimizer step."""

    def __init__(self, last_step: int):
        self.remaining = last_step

    def __call__(self) -> None:
        self.remaining -= 1
        if not self.remaining:
            os.kill(os.getpid(), signal.SIGKILL)


class Gate:
    """Stops the run after each optimizer step until the other end of the pipe lets it go on.

    Sends the seconds since it was let go on, of the clock and of all threads on the CPU; after the first step, None.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.started: tuple[float, float] | None = None

    def __call__(self) -> None:
        if self.started is None:
            self.connection.send(None)
        else:
            self.connection.send(tuple(now - start for now, start in zip(clocks(), self.started, strict=True)))
        self.connection.recv()
        self.started = clocks()


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Collectives(TorchDispatchMode):
    """Counts the collectives of the main thread and their bytes, step by step.

    steps: for each optimizer step, the kinds of collectives with their number and the bytes of their tensors, which
    are those that are sent and those that are received. Pickled objects count as 0 bytes. The first step has the
    start of the run, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, list[int]]] = []
        self.present: dict[str, list[int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # a DTensor first turns the operation into operations on its local tensors, which then come here
            return NotImplemented
        if func.namespace in NAMESPACES and func._opname not in LOCAL:
            count = self.present.setdefault(f"{func.namespace}.{func._opname}", [0, 0])
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            is_object = func._opname in OF_OBJECTS and all(tensor.dtype == torch.uint8 for tensor in tensors)
            count[0] += 1
            count[1] += 0 if is_object else sum(tensor.nbytes for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def end_step(self) -> None:
        self.steps.append(self.present)
        self.present = {}


# the report


def write_report(path: Path, collectives: Collectives | None) -> None:
    counters: dict[str, Any] = torch._dynamo.utils.counters if "torch._dynamo.utils" in sys.modules else {}
    report = {
        "peak_bytes": peak_bytes(),
        "compilations": counters.get("stats", {}).get("unique_graphs", 0),
        "collectives": None if collectives is None else collectives.steps,
    }
    path.write_text(json.dumps(report), encoding="utf-8")


def peak_bytes() -> int:
    """Return the peak of this process's resident memory.

    It is not ru_maxrss, because Linux lets a process begin with that of the process that has started it.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kibibytes) << 10
