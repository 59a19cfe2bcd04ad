"""Runs one process of `python -m stillhouse`, and reports what it has needed. It runs in place of the module.

    python process.py --tree ../before --report reports -- distill run.yaml

`--tree` is the source tree that has to be measured; PYTHONPATH names it, too, and a process that would import another
one stops. The report of rank r is `reports/<r>.json`: the peak of its resident memory, the number of functions that
torch.compile has compiled and, with `--collectives`, the collectives of each step.

Nothing of Stillhouse is imported here but the module that the command line runs as. So this file measures every
version, whatever its modules are called. The borders of steps are the optimizer's, through a hook of torch.
"""

import argparse
import atexit
import contextlib
import importlib.util
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# This folder is first on the path of a script, where its modules would hide others of the same name.
sys.path.pop(0)

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
#: operations of these namespaces that send nothing
LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
#: operations that send pickled objects as bytes; the length of these depends on the digits of numbers in them
OF_OBJECTS = ("allgather_", "broadcast_", "gather_", "scatter_", "send", "recv_")


def main() -> None:
    arguments = parse_arguments()
    require_tree(arguments.tree)
    collectives = Collectives() if arguments.collectives else None
    if collectives is not None:
        on_step(collectives.end_step)
    if arguments.kill_after_step:
        on_step(killer(arguments.kill_after_step))
    if arguments.gate:
        on_step(Gate(*arguments.gate))
    if arguments.report is not None:
        write_at_exit(arguments.report, collectives)
    sys.argv = ["stillhouse", *arguments.command]
    with collectives or contextlib.nullcontext():
        runpy.run_module("stillhouse", run_name="__main__", alter_sys=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tree", type=Path, required=True, help="root of the source tree")
    add("--report", type=Path, help="folder of the reports")
    add("--collectives", action="store_true", help="count collectives; torch compiles nothing then")
    add("--kill-after-step", type=int, default=0, help="end by SIGKILL after this optimizer step; 0: never")
    add("--gate", type=int, nargs=2, metavar=("READ", "WRITE"), help="descriptors of pipes; see Gate")
    add("command", nargs="+", help="arguments of stillhouse")
    return parser.parse_args()


def require_tree(tree: Path) -> None:
    spec = importlib.util.find_spec("stillhouse")
    origin = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
    if origin is None or tree.resolve() not in origin.parents:
        raise SystemExit(f"this process would import stillhouse from {origin}; expected the tree {tree}")


def on_step(call: Callable[[], None]) -> None:
    def hook(optimizer: Optimizer, arguments: Any, options: Any) -> None:
        call()

    register_optimizer_step_post_hook(hook)


# what happens at the border of a step


def killer(last_step: int) -> Callable[[], None]:
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


class Gate:
    """Stops the run after each optimizer step until the harness lets it go on.

    Writes the seconds since it was let go on, those of the clock and those of all the process's threads on the CPU,
    as one line of JSON, and then waits for one byte.
    """

    def __init__(self, read: int, write: int):
        self.read, self.write = read, write
        self.started: tuple[float, float] | None = None

    def __call__(self) -> None:
        seconds = (
            None if self.started is None else [now - start for now, start in zip(clocks(), self.started, strict=True)]
        )
        os.write(self.write, json.dumps(seconds).encode() + b"\n")
        os.read(self.read, 1)
        self.started = clocks()


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


# collectives


class Collectives(TorchDispatchMode):
    """Counts the collectives of this thread and their bytes, step by step.

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


def write_at_exit(folder: Path, collectives: Collectives | None) -> None:
    """Write the report when Python ends, or before os._exit, which ends a process without the functions of atexit."""
    exit_at_once = os._exit
    process = os.getpid()

    def write() -> None:
        if os.getpid() == process:  # not in a child process that was forked
            write_report(folder, collectives)

    def write_and_exit(code: int) -> None:
        write()
        exit_at_once(code)

    atexit.register(write)
    os._exit = write_and_exit  # type: ignore[assignment]


def write_report(folder: Path, collectives: Collectives | None) -> None:
    counters: dict[str, Any] = torch._dynamo.utils.counters if "torch._dynamo.utils" in sys.modules else {"stats": {}}
    report = {
        "peak_bytes": peak_bytes(),
        "compilations": counters["stats"].get("unique_graphs", 0),
        "collectives": None if collectives is None else collectives.steps,
    }
    path = folder / f"{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(report), encoding="utf-8")


def peak_bytes() -> int:
    """Return the peak of this process's resident memory.

    It is not ru_maxrss, because Linux lets a process begin with that of the process that has started it.
    """
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kibibytes) << 10


if __name__ == "__main__":
    main()
