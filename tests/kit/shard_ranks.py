"""Processes that form a gloo group, for tests of computations over several ranks.

A `RankPool` starts its ranks once and gives them jobs in batches. A job is a function that every rank calls with its
`Rank` and an argument. If a rank raises, dies or hangs, the job fails within its time limit. Then the pool starts new
ranks, because the old ones may wait in different collectives.
"""

import os
import pickle
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from kit.fork_server import fork_server
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

#: the names that `Collectives` counts for all_gather_into_tensor, all_reduce and all_to_all_single
GATHER, SUM, EXCHANGE = "_allgather_base_", "allreduce_", "alltoall_base_"
#: seconds in which the other ranks may report their errors, after the first error
GRACE = 1.0
#: new processes replace those of a pool before a batch of jobs, if a rank has more threads than this
MOST_THREADS = 250
#: after this many failed jobs, the rest of a batch is not tried
MAX_FAILURES = 4

Result = TypeVar("Result")
_shared: list["RankPool"] = []


@dataclass(frozen=True)
class Rank:
    """The rank that runs a job. groups[n]: the first n ranks, if this is one of them. pair: 0 and 1, 2 and 3, …"""

    number: int
    groups: dict[int, ProcessGroup]
    pair: ProcessGroup


@dataclass(frozen=True)
class Failure:
    """The error of a job that at least one rank did not finish."""

    text: str


class RankPool:
    """A number of processes that run jobs. size: their number.

    Each group that a job creates leaves threads behind, which wake a hundred times a second: a hundred groups would
    need half of the machine. So new processes replace those with many threads.
    """

    def __init__(self, size: int = 4):
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="stillhouse-ranks-")
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        self._folder.cleanup()

    def rest(self) -> None:
        """End all processes. The next job starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []

    def call(self, function: Callable[[Rank, Any], Any], job: Any = None, *, limit: float = 60.0) -> list[Any]:
        """Return each rank's result of one job. Raises AssertionError with the ranks' tracebacks."""
        answer = self.run(function, [job], limit=limit)[0]
        if isinstance(answer, Failure):
            raise AssertionError(answer.text)
        return answer

    def run(
        self, function: Callable[[Rank, Any], Any], jobs: Sequence[Any], *, limit: float = 60.0
    ) -> list[list[Any] | Failure]:
        """Return for each job the ranks' results, or the failure. limit: seconds for each job."""
        answers: list[list[Any] | Failure] = []
        for _ in range(MAX_FAILURES):
            if len(answers) < len(jobs):
                answers += self._until_failure(function, jobs[len(answers) :], limit)
        return answers + (len(jobs) - len(answers)) * [Failure("not tried after too many failed jobs")]

    def _until_failure(
        self, function: Callable[[Rank, Any], Any], jobs: Sequence[Any], limit: float
    ) -> Iterator[list[Any] | Failure]:
        if any(_threads(process) > MOST_THREADS for process in self._processes):
            self.rest()
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            _send(pipe, (function, list(jobs)))
        for _ in jobs:
            answer = self._answer(limit)
            if isinstance(answer, Failure):
                self.rest()
            yield answer
            if isinstance(answer, Failure):
                return

    def _answer(self, limit: float) -> list[Any] | Failure:
        """Return one job's result from every rank. After the first failure, wait only `GRACE` seconds more."""
        results, failures = {}, {}
        deadline = time.monotonic() + limit
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    finished, result = _receive(pipe)
                except (EOFError, OSError):
                    finished, result = False, "died"
                (results if finished else failures)[rank] = result
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        failures |= {rank: f"no answer in {limit} s" for rank in waiting.values() if not failures}
        if failures:
            return Failure("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = fork_server()
        self._starts += 1
        store = Path(self._folder.name) / str(self._starts)
        with _one_thread():
            for number in range(self.size):
                pipe, end = context.Pipe()
                arguments = (number, self.size, str(store), end)
                process: ForkServerProcess = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                end.close()
                self._pipes.append(pipe)
                self._processes.append(process)


@cache
def shared_pool(size: int = 4) -> RankPool:
    """Return the ranks that all tests of a module share."""
    _shared.append(RankPool(size))
    return _shared[-1]


def on_ranks(function: Callable[..., Result], count: int, *arguments: Any, limit: float = 120.0) -> list[Result]:
    """Call `function(rank, *arguments)` in `count` processes that form a gloo group; return the results by rank.

    function: of a module. Raises AssertionError with the ranks' tracebacks. The processes stay for the module's other
    tests with the same count. limit: seconds.
    """
    pool = shared_pool(count)
    for other in _shared:
        if other is not pool:
            other.rest()
    return pool.call(_unpacked, (function, arguments), limit=limit)


def message_of(function: Callable[..., object], *arguments: Any) -> str:
    """Return the message of the ValueError that a call raises on this rank; "" without an error."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def _unpacked(rank: Rank, job: tuple[Callable[..., Result], tuple[Any, ...]]) -> Result:
    function, arguments = job
    return function(rank, *arguments)


def rest() -> None:
    """End the processes of all shared pools."""
    for pool in _shared:
        pool.rest()


def _threads(process: BaseProcess) -> int:
    """The number of a process's threads; 0 on a system without /proc."""
    tasks = Path(f"/proc/{process.pid}/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _send(pipe: Connection, value: Any) -> None:
    # with pickle, because `Connection.send` would put every tensor into shared memory
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # noqa: S301 from a process of ours


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give each rank one thread, because the ranks share the cores of the machine."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS")
    os.environ |= {} if before is None else {"OMP_NUM_THREADS": before}


def _serve(number: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    limit, method = timedelta(minutes=5), f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=number, world_size=size, timeout=limit)
    # every rank must create every group in the same order
    own_group = [dist.new_group([rank]) for rank in range(size)][number]
    first = {count: dist.new_group(list(range(count))) for count in range(2, size + 1)}
    pairs = [dist.new_group([*range(size)][start : start + 2]) for start in range(0, size, 2)]
    groups = {1: own_group} | {count: group for count, group in first.items() if number < count}
    rank = Rank(number, groups, pairs[number // 2])
    while True:
        try:
            function, jobs = _receive(pipe)
        except EOFError:
            return
        for job in jobs:
            try:
                answer = True, function(rank, job)
            except Exception:  # noqa: BLE001 it is raised in the test
                answer = False, traceback.format_exc()
            _send(pipe, answer)
            if not answer[0]:
                break


class Collectives(TorchDispatchMode):
    """Counts all collectives of this rank, and the elements of the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.counts[func.overloadpacket.__name__] += 1
            self.largest = max(self.largest, *map(_elements, args))
        return func(*args, **(kwargs or {}))


def _elements(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, list | tuple) else 0
