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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any

from stillhouse.display import first_line
from stillhouse.user_code.call_queue import Call, CallQueue
from stillhouse.user_code.episodes import Episode, episode_of
from stillhouse.user_code.functions import UserFunctionError, about_completion
from stillhouse.user_code.messages import SECONDS_BETWEEN_LOOKS, Messages
from stillhouse.user_code.worker import ERROR, OUT_OF_MEMORY, UNUSABLE, VALUE

#: seconds in which a worker must have imported the functions
SECONDS_TO_START = 600.0
#: how often a call is made until it raises an error
_ATTEMPTS = 2
#: the kernel sends SIGHUP to a group of which a process is stopped when the run ends
_GUARD = ("/bin/sh", "-c", "trap '' HUP; read line; kill -KILL 0")
_WORKER = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings['path']; "
    "from stillhouse.user_code.worker import serve; serve(settings)"
)


class WorkerPool:
    """Worker processes that call functions of the user.

    functions: pairs of configuration key and path.
    count: the number of processes. seconds: the limit for one call.
    memory_gib: how much memory a worker may allocate, in GiB, in addition to what its functions' modules need.
    add_seconds: gets the key of a call and the seconds until its answer, in the thread of its worker.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        count: int,
        *,
        seconds: float,
        memory_gib: float | None = None,
        add_seconds: Callable[[str, float], None] = lambda key, seconds: None,
    ):
        self._functions, self._seconds, self._add_seconds = list(functions), seconds, add_seconds
        self._memory_gib, self._calls = memory_gib, CallQueue(count)
        self._lock, self._is_closed = threading.Lock(), False
        self._workers: set[Worker] = set()
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"worker {number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def request(self, key: str, path: str, arguments: Sequence[Any]) -> Future[Any]:
        """Start a call of a function; for its arguments, see `FunctionCalls.request`.

        The future raises UserFunctionError with the function and the completion if the function fails, or if two
        workers did not return. If the pool is closed, it is never done.
        """
        future: Future[Any] = Future()
        self._calls.put(Call(self._functions.index((key, path)), tuple(arguments), future))
        return future

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
        worker: Worker | None = None
        try:
            with suppress(LostError, ValueError):  # the next call repeats the start, and has the error
                worker = self._start()
            while (call := self._calls.get(number)) is not None:
                worker = self._answer(call, worker)
        except _ClosedError:
            return
        finally:
            self._end(worker)

    def _answer(self, call: Call, worker: "Worker | None") -> "Worker | None":
        """Make a call, and set the result of its future. Returns the worker for the next call, None if it is lost."""
        try:
            return self._attempts(call, worker)
        finally:
            if not call.future.done():
                call.future.set_exception(ValueError(f"{self._name(call)} was given up, because the run ends"))

    def _attempts(self, call: Call, worker: "Worker | None") -> "Worker | None":
        is_started, problem = False, ""
        for _ in range(_ATTEMPTS):
            is_started = worker is not None
            try:
                worker, is_started = self._start() if worker is None else worker, True
                started = time.monotonic()
                answer = worker.call(call.at, call.arguments, self._seconds)
                self._add_seconds(self._functions[call.at][0], time.monotonic() - started)
            except LostError as error:
                self._end(worker)
                problem, worker = str(error), None
                continue
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
            problem = f"{name} {problem}{about_completion(*call.arguments[1::2])}"
        first, *frames = problem.split("\n")
        # a process that does not start is no fault of the call, and must not become a reply to a model
        kind = CallLostError if is_started else UserFunctionError
        repeated = "; the call was repeated once, in a new process, with the same result"
        call.future.set_exception(kind("\n".join([first + repeated, *frames])))
        return worker

    def _name(self, call: Call) -> str:
        key, path = self._functions[call.at]
        return f"{key}: {path}"

    def _start(self) -> "Worker":
        with self._lock:
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

    def _end(self, worker: "Worker | None") -> None:
        """End a worker."""
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.end()


class CallLostError(UserFunctionError):
    """A call has not returned, in two processes that had started."""


class _ClosedError(Exception):
    """The pool was closed."""


class LostError(Exception):
    """A worker has ended, or does not answer. The message continues a sentence that begins with the function."""


class Worker:
    """A process that answers one call at a time, and its guard. Raises OSError if they cannot be started."""

    def __init__(self, functions: Sequence[tuple[str, str]], memory_gib: float | None):
        self._memory_gib = memory_gib
        self._samples: set[int] = set()  # those whose objects it may have
        self._connection, its_connection = socket.socketpair()
        self._messages = Messages(self._connection)
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
        answer = self._answer(None, SECONDS_TO_START, "is not imported within {:g} s")
        if ERROR in answer:
            raise ValueError(answer[ERROR])

    def call(self, at: int, arguments: Any, seconds: float) -> Mapping[str, Any]:
        """Call the function number `at`, and return its answer; see `worker.py`."""
        try:
            request = bytes(ForkingPickler.dumps((at, arguments)))
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"{arguments[3]}: the record cannot be sent to a process of rollout.workers "
                f"({first_line(error)}): expected texts, numbers, lists and the like, or rollout.workers=0"
            ) from error
        calls = self._calls(episode_of(arguments))
        each_call = f" for each of {calls} calls" if calls > 1 else ""
        late = f"does not return within {{:g}} s, the value of rollout.worker_timeout{each_call},"
        return self._answer(request, seconds * calls, late)

    def _calls(self, episode: Episode | None) -> int:
        """The number of the object's calls in a call: without the sample's object, those of earlier turns, too."""
        if episode is None:
            return 1
        calls = 1 + episode.wants_reward if episode.number in self._samples else episode.calls
        change = self._samples.discard if episode.has_ended else self._samples.add
        change(episode.number)
        return calls

    def _answer(self, request: bytes | None, seconds: float, late: str) -> Mapping[str, Any]:
        """The answer to a request, or the one at the start. seconds: from the first byte of the request on."""
        until = time.monotonic() + seconds
        try:
            if request is not None:
                self._messages.send(request, until, self._exists)
            answer: Mapping[str, Any] = json.loads(self._messages.receive(until, self._exists))
        except TimeoutError:
            raise LostError(late.format(seconds)) from None
        except (EOFError, OSError):
            raise LostError(self._how_it_ended()) from None
        return answer

    def _exists(self) -> bool:
        """Whether the worker runs; a program that it has started may keep the connection open for longer."""
        return self._process.poll() is None

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(SECONDS_BETWEEN_LOOKS)
        except subprocess.TimeoutExpired:
            return "closes the connection of its process"
        limit = "" if self._memory_gib is None else f" (its limit is {self._memory_gib:g} GiB of memory)"
        if code >= 0:
            return f"ends its process with exit code {code}{limit if code == OUT_OF_MEMORY else ''}"
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
