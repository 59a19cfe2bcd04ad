"""A function that runs foreign code in a process of its own: it can neither hang this one nor fill its memory.

Neither an alarm nor a thread ends one long operation of the interpreter, such as 10**10**8; the kernel ends a
process. The process is a fork: it has the function and all that it needs, and waits for arguments. What goes to and
fro is JSON.
"""

import gc
import json
import os
import resource
import signal
import struct
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

SIZE = struct.Struct("<Q")


class LimitError(ValueError):
    """The process was ended by a limit, or ended itself."""


class Isolated:
    """`function` in a process of its own, which is started at the first call and again after its end.

    seconds: of processor time for one call; the machine's load does not count. memory_bytes: that a call may take
    besides what the process has (kept on Linux only). Arguments and results are JSON's types. A function says what is
    wrong with its arguments by an ordinary result: an error that it raises ends the process.
    """

    def __init__(self, function: Callable[..., Any], *, seconds: float, memory_bytes: int):
        self.function = function
        self.seconds = seconds
        self.memory_bytes = memory_bytes
        self._process: _Process | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The function's result. Raises LimitError, and TypeError for arguments that JSON does not know."""
        request = json.dumps(arguments, default=_placeholder).encode()
        if self._process is None:
            self._process = _Process(self.function, self.seconds, self.memory_bytes)
        answer = self._process.ask(request)
        if answer is None:
            status, self._process = self._process.end(), None
            assert status is not None, "it was ended before"
            raise LimitError(self._ended(status))
        return json.loads(answer)

    def _ended(self, status: int) -> str:
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            return f"it took more than {self.seconds:g} seconds of processor time"
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        return f"its process ended with {how} (the limit is {self.memory_bytes / 2**30:g} GiB of memory)"


class _Process:
    """A forked child that answers requests one by one until its end of the pipe is closed."""

    def __init__(self, function: Callable[..., Any], seconds: float, memory_bytes: int):
        its_requests, requests = os.pipe()
        answers, its_answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # of threads: the child uses none of theirs, and takes no lock that one of them may hold
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            os.close(requests)
            os.close(answers)
            _serve(function, os.fdopen(its_requests, "rb"), os.fdopen(its_answers, "wb"), seconds, memory_bytes)
        os.close(its_requests)
        os.close(its_answers)
        self.requests, self.answers = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        self.end = weakref.finalize(self, _end, pid, self.requests, self.answers)

    def ask(self, request: bytes) -> bytes | None:
        """The answer; None where the process ends instead."""
        try:
            _write(self.requests, request)
        except BrokenPipeError:
            return None
        return _read(self.answers)


def _end(pid: int, *pipes: BinaryIO) -> int:
    """Close the pipes, and return how the child ended."""
    for pipe in pipes:
        try:
            pipe.close()
        except BrokenPipeError:  # a request that it did not live to read
            continue
    # a later fork may hold its pipe open, so that it would wait on; one that is ending keeps its own status
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _serve(
    function: Callable[..., Any], requests: BinaryIO, answers: BinaryIO, seconds: float, memory_bytes: int
) -> NoReturn:
    """The child. It must never return into the code that it was forked from."""
    try:
        gc.freeze()  # what it has from its parent is not its own to take down
        signal.set_wakeup_fd(-1)  # the parent's: a signal to the whole group would reach it twice
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle: its end is the child's, too
        _limit_memory(memory_bytes)
        while (request := _read(requests)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            answer = json.dumps(function(*json.loads(request))).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, answer)
        os._exit(0)
    finally:
        os._exit(1)


def _limit_memory(more: int) -> None:
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[5])  # data and stack
    except OSError:
        return
    limit = pages * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _write(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(SIZE.pack(len(content)) + content)
    pipe.flush()


def _read(pipe: BinaryIO) -> bytes | None:
    size = pipe.read(SIZE.size)
    if len(size) < SIZE.size:
        return None
    content = pipe.read(SIZE.unpack(size)[0])
    return content if len(content) == SIZE.unpack(size)[0] else None


def _placeholder(value: Any) -> str:
    """What transformers shows a chat template of a value that JSON does not know."""
    return f"<{type(value).__name__}>"
