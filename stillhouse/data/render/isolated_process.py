"""Runs untrusted code in a separate process, so that it can neither hang this process nor use up its memory.

An alarm or a thread cannot interrupt one long operation of the interpreter, such as 10**10**8, but the kernel can end
a process. The process is a fork, so that it already has the function and its data. Arguments and results are sent as
JSON.
"""

import gc
import json
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from stillhouse.memory_limit import limit_memory


class LimitError(ValueError):
    """The process ended before it returned a result, because of a limit or for another reason."""


class Isolated:
    """Calls `function` in a separate process. A call starts the process if it does not run.

    seconds: limit of processor time for one call; it does not depend on the machine's load.
    memory_bytes: limit of the memory that the process allocates after its start (only on Linux).

    Arguments and results have JSON types. The function must report errors in its result; an exception ends the
    process.
    """

    def __init__(self, function: Callable[..., Any], *, seconds: float, memory_bytes: int):
        self.function = function
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self._process: _Process | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The function's result. Raises LimitError if the process ends before it returns one.

        `_placeholder` replaces argument values of types that JSON does not have; a dict key of such a type raises
        TypeError.
        """
        request = json.dumps(arguments, default=_placeholder).encode()
        if self._process is None:
            self._process = _Process(self.function, self.seconds, self.memory_bytes)
        answer = self._process.send(request)
        if answer is None:
            status, self._process = self._process.end(), None
            assert status is not None, "the process was ended before"
            raise LimitError(self._ended(status))
        return json.loads(answer)

    def _ended(self, status: int) -> str:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return f"it took more than {self.seconds:g} seconds of processor time"
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        return f"its process ended with {how} (the limit is {self.memory_bytes / 2**30:g} GiB of memory)"


class _Process:
    """A forked child that answers requests one by one until the connection is closed."""

    def __init__(self, function: Callable[..., Any], seconds: float, memory_bytes: int):
        self.connection, its_connection = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns about forking with threads. The child uses no other thread and no lock of another thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            self.connection.close()
            _serve(function, its_connection, seconds, memory_bytes)
        its_connection.close()
        self.end = weakref.finalize(self, _end, pid, self.connection)

    def send(self, request: bytes) -> bytes | None:
        """Return the answer to a request; None if the process ends without an answer."""
        try:
            self.connection.send_bytes(request)
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None


def _end(pid: int, connection: "Connection[Any, Any]") -> int:
    connection.close()
    # Closing is not enough: a process forked later may keep the connection open, so that the child would not end.
    # If the child has already ended, the signal does not change its exit status.
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(
    function: Callable[..., Any], connection: "Connection[Any, Any]", seconds: float, memory_bytes: int
) -> NoReturn:
    """The child's main loop. It must never return, because its caller is the forked code of the parent."""
    try:
        gc.freeze()  # the child must not finalize objects of its parent
        signal.set_wakeup_fd(-1)  # otherwise a signal to the process group would reach the parent twice
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it; the child ends with the parent
        _close_all_but(connection)
        limit_memory(memory_bytes)
        while True:
            request = connection.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = json.dumps(function(*json.loads(request))).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(answer)
    finally:
        os._exit(1)


def _close_all_but(connection: "Connection[Any, Any]") -> None:
    """Close all files but the standard ones and the connection.

    If another thread was starting a program at the fork, it waits until the pipe of this start is closed in all
    processes, which here would be until the child ends.
    """
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def _placeholder(value: Any) -> str:
    """The text that transformers shows to a chat template in place of a value that JSON cannot represent."""
    return f"<{type(value).__name__}>"
