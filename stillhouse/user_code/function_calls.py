"""The calls of the user's functions: one after the other in this process, or many at once in worker processes.

If a worker ends, hangs or runs out of memory, it is replaced, and its call is repeated once. All calls with an
`Episode` of the same sample go to the same worker, which has the sample's object.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from stillhouse.display import first_line
from stillhouse.user_code.environment import answer_of, episode_of
from stillhouse.user_code.functions import UserFunctionError, about_completion
from stillhouse.user_code.worker import ERROR, UNUSABLE, VALUE, LostError, Worker

#: the number of attempts after which a call raises an error
_ATTEMPTS = 2


class CallLostError(UserFunctionError):
    """Raised if a call has not returned in two worker processes, although the processes had started."""


class _ClosedError(Exception):
    """Raised if a worker would be started after `FunctionCalls.close`."""


@dataclass(eq=False)
class _Call:
    at: int
    arguments: tuple[Any, ...]
    future: "Future[Any]" = field(default_factory=Future)


class FunctionCalls:
    """Calls the user's functions by their configuration keys and paths.

    functions: pairs of key and path; the paths of tools are one text with spaces (see `answer_of`).
    workers: the number of processes that call the functions. If it is 0, `request` calls a function in this process,
        in the thread of its caller.
    seconds: the time limit of a call in a worker.
    memory_gib: the memory in GiB that a worker may allocate in addition to the memory of its functions' modules.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        workers: int = 0,
        seconds: float = 60.0,
        memory_gib: float | None = None,
    ):
        self._functions, self._seconds, self._memory_gib = list(functions), seconds, memory_gib
        self._here = {} if workers else {name: answer_of(*name) for name in self._functions}
        self._lock, self._times = threading.Lock(), dict[str, tuple[int, float]]()
        self._changed, self._is_closed, self._workers = threading.Condition(), False, set[Worker]()
        # waiting calls: those that any worker can make, and for each worker those with episodes of its samples
        self._for_any, self._for_worker = deque[_Call](), [deque[_Call]() for _ in range(workers)]
        # the worker of each sample. It is not number % workers, which can be equal for all samples of a source
        self._worker_of, self._next_worker = dict[int, int](), cycle(range(workers))
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"worker {number}", daemon=True)
            for number in range(workers if self._functions else 0)
        ]
        #: whether `request` returns at once, because workers make the calls; any thread can then call it
        self.are_elsewhere = bool(self._threads)
        for thread in self._threads:
            thread.start()

    def request(self, key: str, path: str, *arguments: Any) -> Future[Any]:
        """Start a call, and return the future of its result.

        arguments: (prompt, completion, record, source), for an environment with a state also an `Episode`, and for a
            reward with a parameter `turns` also the turns.

        If the call fails, or if it has not returned in two workers, the future raises UserFunctionError. Without
        workers, this method raises it. After `close`, the future can remain pending forever.
        """
        if not self.are_elsewhere:
            started, future = time.monotonic(), Future[Any]()
            future.set_result(self._here[key, path](*arguments))
            self._add_seconds(key, started)
            return future
        call, episode = _Call(self._functions.index((key, path)), arguments), episode_of(arguments)
        with self._changed:
            if episode is None:
                self._for_any.append(call)
            else:
                worker = self._worker_of.pop(episode.number, None)
                worker = next(self._next_worker) if worker is None else worker
                if not episode.has_ended:
                    self._worker_of[episode.number] = worker
                self._for_worker[worker].append(call)
            self._changed.notify_all()
        return call.future

    def take_times(self) -> dict[str, tuple[int, float]]:
        """Return the number and the total seconds of the functions' calls since the last call of this method, by the
        configuration keys of the functions.
        """
        with self._lock:
            times, self._times = self._times, {}
        return times

    def close(self) -> None:
        """Kill the workers and the programs that they have started. Futures of open calls can remain pending."""
        with self._changed:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _add_seconds(self, key: str, started: float) -> None:
        with self._lock:
            count, total = self._times.get(key, (0, 0.0))
            self._times[key] = count + 1, total + time.monotonic() - started

    def _serve(self, number: int) -> None:
        worker: Worker | None = None
        try:
            with suppress(LostError, ValueError):  # the first call tries again to start a worker, and gets the error
                worker = self._start()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or self._for_worker[number] or self._for_any)
                    if self._is_closed:
                        return
                    call = (self._for_worker[number] or self._for_any).popleft()
                try:
                    worker = self._answer(call, worker)
                finally:
                    if not call.future.done():
                        given_up = f"the call of {self._name(call)} was given up, because the run ends"
                        call.future.set_exception(ValueError(given_up))
        except _ClosedError:
            return
        finally:
            self._end(worker)

    def _answer(self, call: _Call, worker: Worker | None) -> Worker | None:
        """Make a call, and set its future. Returns the worker for the next call, or None if the worker was lost."""
        is_started, problem = False, ""
        for _ in range(_ATTEMPTS):
            is_started = worker is not None
            try:
                worker, is_started = self._start() if worker is None else worker, True
                started = time.monotonic()
                answer = worker.call(call.at, call.arguments, self._seconds)
                self._add_seconds(self._functions[call.at][0], started)
            except LostError as error:
                answer = {UNUSABLE: str(error)}
            except ValueError as error:
                call.future.set_exception(UserFunctionError(str(error)))
                self._end(worker)
                return None
            if UNUSABLE in answer:
                self._end(worker)
                problem, worker = answer[UNUSABLE], None
                continue
            if ERROR in answer:
                call.future.set_exception(UserFunctionError(answer[ERROR]))
            else:
                call.future.set_result(answer[VALUE])
            return worker
        if not problem.startswith(name := self._name(call)):
            problem = f"{name} {problem}{about_completion(*call.arguments[1:4:2])}"
        first, *frames = problem.split("\n")
        # if the second process did not start, the call is not the cause, so its error must not become a tool's reply
        kind = CallLostError if is_started else UserFunctionError
        repeated = "; the call was repeated once, in a new process, with the same result"
        call.future.set_exception(kind("\n".join([first + repeated, *frames])))
        return worker

    def _name(self, call: _Call) -> str:
        return ": ".join(self._functions[call.at])

    def _start(self) -> Worker:
        with self._changed:
            if self._is_closed:
                raise _ClosedError
            try:
                worker = Worker(self._functions, self._memory_gib)
            except OSError as error:
                raise LostError(f"needs a new process, which does not start ({first_line(error)})") from error
            self._workers.add(worker)
        try:
            worker.require_started()
        except (LostError, ValueError):
            self._end(worker)
            raise
        return worker

    def _end(self, worker: Worker | None) -> None:
        if worker is not None:
            with self._changed:
                self._workers.discard(worker)
            worker.end()
