"""Runs the user's functions in worker processes, many calls at once, each with a limit of time and memory.

Workers are new Python processes. They share no state with the run, and do not import torch unless a function does.
They are not forks as in `data/render/isolated_process.py`, because functions of the user may hang in a fork of a
process with threads and a device. If a worker ends, hangs or runs out of memory, it is replaced, and its call is
repeated once. All calls with the `Episode` of one sample go to one worker, which has the sample's object.

Each worker is in a process group with a guard, a shell that waits for the end of a pipe from the run. If the run ends
in any way, the guard kills the group: the worker, and the programs that a function has started in it.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import cycle
from multiprocessing import Pipe
from typing import Any

from stillhouse.display import first_line
from stillhouse.user_code.episodes import Episode
from stillhouse.user_code.functions import about_completion
from stillhouse.user_code.worker import ERROR, UNUSABLE, VALUE

#: seconds in which a worker must have imported the functions
SECONDS_TO_START = 600.0
#: how often a call is made until it raises an error
_ATTEMPTS = 2
_SECONDS_BETWEEN_LOOKS = 0.5
_GUARD = ("/bin/sh", "-c", "read line; kill -KILL 0")
_WORKER = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings['path']; "
    "from stillhouse.user_code.worker import serve; serve(settings)"
)
_Arguments = tuple[str, str, Mapping[str, Any], str] | tuple[str, str, Mapping[str, Any], str, Episode]


class WorkerPool:
    """Worker processes that call functions of the user.

    functions: pairs of configuration key and path; a key may have several functions.
    count: the number of processes. seconds: the limit for one call.
    memory_gib: how much memory a worker may allocate, in GiB, in addition to what its functions' modules need.
    """

    def __init__(
        self, functions: Sequence[tuple[str, str]], count: int, *, seconds: float, memory_gib: float | None = None
    ):
        self._functions, self._seconds = list(functions), seconds
        self._memory_gib = memory_gib
        self._calls = _Queue(count)
        self._lock, self._is_closed = threading.Lock(), False
        self._workers: set[_Worker] = set()
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"worker {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def caller(self, key: str, path: str | None = None) -> Callable[..., Future[Any]]:
        """Return a function that starts a call (prompt, completion, record, source) of this key's function; for a
        class, with an `Episode` as a fifth argument.

        path: which function, if the key has several. The future raises ValueError with the function and the
        completion if the function fails, or if two workers did not return. If the pool is closed, it is never done.
        """
        at = next(at for at, of in enumerate(self._functions) if of[0] == key and path in (None, of[1]))

        def call(*arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self._calls.put(_Call(at, arguments, future))
            return future

        return call

    def close(self) -> None:
        """Kill the workers and the programs that they have started."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
        self._calls.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, number: int) -> None:
        worker: _Worker | None = None
        try:
            with suppress(_LostError, ValueError):  # the next call repeats the start, and has the error
                worker = self._start()
            while (call := self._calls.get(number)) is not None:
                worker = self._answer(call, worker)
        except _ClosedError:
            return
        finally:
            self._end(worker)

    def _answer(self, call: "_Call", worker: "_Worker | None") -> "_Worker | None":
        """Make a call, and set the result of its future. Returns the worker for the next call, None if it is lost."""
        try:
            return self._attempts(call, worker)
        finally:
            if not call.future.done():
                call.future.set_exception(ValueError(f"{self._name(call)} was given up, because the run ends"))

    def _attempts(self, call: "_Call", worker: "_Worker | None") -> "_Worker | None":
        problem, is_started = "", False
        for _ in range(_ATTEMPTS):
            is_started = worker is not None
            try:
                worker, is_started = self._start() if worker is None else worker, True
                answer = worker.call(call, self._seconds)
            except _LostError as error:
                self._end(worker)
                problem, worker = str(error), None
                continue
            except ValueError as error:
                call.future.set_exception(error)
                self._end(worker)
                return None
            if UNUSABLE in answer:
                self._end(worker)
                problem, worker = answer[UNUSABLE], None
                continue
            if ERROR in answer:
                call.future.set_exception(ValueError(answer[ERROR]))
            else:
                call.future.set_result(answer[VALUE])
            return worker
        if not problem.startswith(name := self._name(call)):
            problem = f"{name} {problem}{about_completion(*call.arguments[1::2])}"
        first, *frames = problem.split("\n")
        again = f"{first}; the call was repeated once, in a new process, with the same result"
        # a process that does not start is no fault of the call, and must not become a reply to a model
        kind = CallLostError if is_started else ValueError
        call.future.set_exception(kind("\n".join([again, *frames])))
        return worker

    def _name(self, call: "_Call") -> str:
        key, path = self._functions[call.at]
        return f"{key}: {path}"

    def _start(self) -> "_Worker":
        with self._lock:
            if self._is_closed:
                raise _ClosedError
            try:
                worker = _Worker(self._functions, self._memory_gib)
            except OSError as error:
                raise _LostError(f"needs a new process, which does not start ({first_line(error)})") from error
            self._workers.add(worker)
        try:
            worker.require_started()
        except (_LostError, ValueError):
            self._end(worker)
            raise
        return worker

    def _end(self, worker: "_Worker | None") -> None:
        """End a worker."""
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.end()


class CallLostError(ValueError):
    """A call has not returned, in two processes that had started."""


class _ClosedError(Exception):
    """The pool was closed."""


class _LostError(Exception):
    """A worker has ended, or does not answer. The message continues a sentence that begins with the function."""


class _Queue:
    """Calls that wait. A call with an episode waits for one worker, all others for any worker."""

    def __init__(self, workers: int):
        self._changed, self._is_closed = threading.Condition(), False
        self._of_any: deque[_Call] = deque()
        self._of_worker: list[deque[_Call]] = [deque() for _ in range(workers)]
        # by the number of a sample; its remainder would not do, because all samples of a source may have the same
        self._worker_of: dict[int, int] = {}
        self._next_worker = cycle(range(workers))

    def put(self, call: "_Call") -> None:
        with self._changed:
            waiting = self._of_any if call.episode is None else self._of_worker[self._worker(call.episode)]
            waiting.append(call)
            self._changed.notify_all()

    def _worker(self, episode: Episode) -> int:
        worker = self._worker_of.pop(episode.number, None)
        worker = next(self._next_worker) if worker is None else worker
        if episode.turns:  # otherwise, the sample has ended
            self._worker_of[episode.number] = worker
        return worker

    def get(self, worker: int) -> "_Call | None":
        """Wait for a call for this worker; None if the queue is closed."""
        with self._changed:
            while not self._is_closed:
                for waiting in (self._of_worker[worker], self._of_any):
                    if waiting:
                        return waiting.popleft()
                self._changed.wait()
        return None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class _Call:
    def __init__(self, at: int, arguments: Any, future: Future[Any]):
        self.at, self.future = at, future
        self.arguments: _Arguments = arguments

    @property
    def episode(self) -> Episode | None:
        """The turns of the sample whose object the call needs."""
        return self.arguments[4] if len(self.arguments) == 5 else None


class _Worker:
    """A process that answers one call at a time, and its guard."""

    def __init__(self, functions: Sequence[tuple[str, str]], memory_gib: float | None):
        self._memory_gib = memory_gib
        self._samples: set[int] = set()  # those whose objects it may have
        self._connection, its_connection = Pipe()
        self._guard = subprocess.Popen(
            _GUARD,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        settings = {
            "path": sys.path,
            "descriptor": its_connection.fileno(),
            "functions": functions,
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            pass_fds=[its_connection.fileno()],
            process_group=self._guard.pid,
        )
        its_connection.close()

    def require_started(self) -> None:
        """Wait until the functions are imported. Raises ValueError if they cannot be imported any more."""
        answer = self._receive(SECONDS_TO_START, "is not imported within {:g} s")
        if ERROR in answer:
            raise ValueError(answer[ERROR])

    def call(self, call: _Call, seconds: float) -> Mapping[str, Any]:
        try:
            self._connection.send((call.at, call.arguments))
        except OSError:
            raise _LostError(self._how_it_ended()) from None
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"{call.arguments[3]}: the record cannot be sent to a process of rollout.workers "
                f"({first_line(error)}): expected texts, numbers, lists and the like, or rollout.workers=0"
            ) from error
        turns = self._turns(call.episode)
        of_turns = f" for each of {turns} turns" if turns > 1 else ""
        late = f"does not return within {{:g}} s, the value of rollout.worker_timeout{of_turns},"
        return self._receive(seconds * turns, late)

    def _turns(self, episode: Episode | None) -> int:
        """The number of turns that a call computes: without the sample's object, the earlier ones, too."""
        if episode is None:
            return 1
        turns = 1 if episode.number in self._samples else max(1, len(episode.turns))
        change = self._samples.add if episode.turns else self._samples.discard
        change(episode.number)
        return turns

    def _receive(self, seconds: float, late: str) -> Mapping[str, Any]:
        end = time.monotonic() + seconds
        try:
            # a program that a function has started may keep the connection open after the worker has ended
            while not self._connection.poll(max(0.0, min(_SECONDS_BETWEEN_LOOKS, end - time.monotonic()))):
                if self._process.poll() is not None and not self._connection.poll(0.0):
                    raise _LostError(self._how_it_ended())
                if time.monotonic() > end:
                    raise _LostError(late.format(seconds))
            answer: Mapping[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise _LostError(self._how_it_ended()) from None
        return answer

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            return "closes the connection of its process"
        if code >= 0:
            return f"ends its process with exit code {code}"
        limit = "" if self._memory_gib is None else f" (its limit is {self._memory_gib:g} GiB of memory)"
        return f"lets its process end by {signal.Signals(-code).name}{limit}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the processes and wait for their end; may be called once."""
        self.kill()
        self._process.kill()  # a function may have left the group
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.wait()
        self._guard.wait()
        self._connection.close()
