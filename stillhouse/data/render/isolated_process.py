"""Runs untrusted code in a separate process, so that it can neither hang this process nor use up its memory.

An alarm or a thread cannot interrupt one long operation of the interpreter, such as 10**10**8, but the kernel can end
a process. The process is a fork, so that it already has the function and its data. Arguments and results are bytes.
"""

import gc
import os
import signal
import socket
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from stillhouse.process import limit_memory
from stillhouse.user_code.messages import Messages

#: the longest wait for an answer, as a multiple of the limit of processor time
_WAIT = 6


class LimitError(ValueError):
    """The process ended or stopped before it returned a result."""


class Isolated:
    """Calls `function` in a separate process. A call starts the process if it is not running.

    seconds: the limit of processor time for one call; it does not depend on the machine's load. A call also ends if
        no answer comes for a multiple of this time, because a stopped process uses no processor time.
    memory_bytes: the limit of the memory that the process allocates after its start (only on Linux).

    The function must report errors in its result; an exception ends the process.
    """

    def __init__(self, function: Callable[[bytes], bytes], *, seconds: float, memory_bytes: int):
        self.function, self.seconds, self.memory_bytes = function, seconds, memory_bytes
        #: the connection to the process, and a function that ends the process and returns its status
        self._process: tuple[Messages, Any] | None = None

    def __call__(self, request: bytes) -> bytes:
        """The function's result. Raises LimitError if the process ends before it answers, or does not answer."""
        # Two attempts, because the first one times out if both processes were stopped for a while (Ctrl+Z).
        for _ in range(2):
            messages, end = self._process or self._started()
            self._process, is_idle = None, False
            until = time.monotonic() + _WAIT * self.seconds
            try:
                messages.send(request, until)
                answer = messages.receive(until)
                is_idle = True
            except TimeoutError:
                continue
            except (EOFError, OSError):
                status = end()
                assert status is not None, "the process was ended before"
                if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                    raise LimitError(f"it took more than {self.seconds:g} seconds of processor time") from None
                how = f"status {os.WEXITSTATUS(status)}"
                if os.WIFSIGNALED(status):
                    how = f"signal {os.WTERMSIG(status)}"
                limit = f"the limit is {self.memory_bytes / 2**30:g} GiB of memory"
                raise LimitError(f"its process ended with {how} ({limit})") from None
            finally:
                if not is_idle:  # the process may still answer, and the next call must not get this answer
                    end()
            if self._process is not None:  # another thread has started another process
                self._process[1]()
            self._process = messages, end
            return answer
        raise LimitError(f"its process did not answer within {_WAIT * self.seconds:g} seconds, twice")

    def _started(self) -> tuple[Messages, Any]:
        """Fork a child that answers requests one by one until the connection is closed or this object is deleted."""
        connection, its_connection = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # Python warns about forking with threads. The child uses no other thread and no lock of another thread.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            connection.close()
            _serve(self.function, its_connection, self.seconds, self.memory_bytes)
        its_connection.close()
        return Messages(connection), weakref.finalize(self, _end, pid, connection)


def _end(pid: int, connection: socket.socket) -> int:
    connection.close()
    # Closing is not enough: a process forked later may keep the connection open, so that the child would not end.
    # If the child has already ended, the signal does not change its exit status.
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(
    function: Callable[[bytes], bytes], connection: socket.socket, seconds: float, memory_bytes: int
) -> NoReturn:
    """The child's main loop. It must never return, because its caller is the forked code of the parent."""
    try:
        gc.freeze()  # the child must not finalize objects of its parent
        signal.set_wakeup_fd(-1)  # otherwise a signal to the process group would reach the parent twice
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl+C; the child ends with the parent
        # Close all other files. One of them can be the pipe of a program that another thread was starting at the
        # fork. That thread waits until all processes have closed the pipe, so it would wait until this child ends.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        limit_memory(memory_bytes)
        messages = Messages(connection)
        while True:
            request = messages.receive()
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = function(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            messages.send(answer)
    finally:
        os._exit(1)
