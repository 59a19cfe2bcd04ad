"""A worker process, which imports the user's functions and answers calls until its run ends.

`answer_calls` runs in the worker process, and `Worker` controls this process from the run. Workers are new Python
processes without torch, not forks: in a fork of a process with threads and a device, a function of the user can hang.
Each worker is in a process group with a guard, a shell that waits for the end of a pipe from the run. However the run
ends, the guard kills the group, including programs that a function has started. Requests are pickled, because records
can have values that JSON lacks. Answers are JSON, so that the run never unpickles the result of a function.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

from stillhouse.display import first_line
from stillhouse.process import limit_memory
from stillhouse.user_code.environment import answer_of, episode_of
from stillhouse.user_code.messages import SECONDS_BETWEEN_LOOKS, Messages

#: the keys of an answer: the result of a call, the message of an error, or the reason why the process is not usable
VALUE, ERROR, UNUSABLE = "value", "error", "unusable"
#: the exit code of a process that cannot hold a request or its answer
OUT_OF_MEMORY = 79
#: the time limit in seconds for a worker to import the functions
SECONDS_TO_START = 600.0
#: the guard ignores SIGHUP, which the kernel sends to the group if one of its processes is stopped when the run ends
_GUARD = ("/bin/sh", "-c", "trap '' HUP; read line; kill -KILL 0")
_WORKER = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings['path']; "
    "from stillhouse.user_code.worker import answer_calls; answer_calls(settings)"
)


def answer_calls(settings: Mapping[str, Any]) -> NoReturn:
    """Answer calls of the run until it closes the connection. This is the main function of a worker process.

    settings: `descriptor`, the file descriptor of the connection; `functions`, pairs of configuration key and path;
        `memory_bytes`, the memory that calls can use in addition to that of the imported functions, or None.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # workers ignore these signals, because the run ends its workers itself. A handler is used instead of SIG_IGN,
        # because programs that a function starts would inherit SIG_IGN
        signal.signal(number, lambda *_: None)
    messages = Messages(socket.socket(fileno=settings["descriptor"]))
    is_limited = settings["memory_bytes"] is not None

    def send(answer: Mapping[str, Any]) -> None:
        messages.send(json.dumps(answer).encode())

    try:
        calls = [answer_of(key, path, is_limited=is_limited) for key, path in settings["functions"]]
    except ValueError as error:
        send({ERROR: str(error)})
        os._exit(1)
    if is_limited:
        limit_memory(settings["memory_bytes"])
    send({VALUE: None})
    try:
        while True:
            at, arguments = ForkingPickler.loads(messages.receive())
            try:
                answer = {VALUE: calls[at](*arguments)}
            except ValueError as error:
                ran_out = is_limited and isinstance(error.__cause__, MemoryError)
                answer = {UNUSABLE if ran_out else ERROR: str(error)}
            with suppress(OSError, ValueError):  # fails if a function has closed stdout
                sys.stdout.flush()
            send(answer)
    except (EOFError, ConnectionError):  # the run has closed the connection
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


class LostError(Exception):
    """Raised if a worker has ended or does not answer. The message is the end of a sentence that begins with the name
    of a function.
    """


class Worker:
    """A process that answers one call at a time, and its guard. Raises OSError if a process cannot be started."""

    def __init__(self, functions: Sequence[tuple[str, str]], memory_gib: float | None):
        self._memory_gib = memory_gib
        self._samples: set[int] = set()  # the samples of which the worker can have an object
        self._connection, its_connection = socket.socketpair()
        self._messages = Messages(self._connection)
        nothing = subprocess.DEVNULL
        self._guard = subprocess.Popen(_GUARD, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, process_group=0)
        settings = {
            "path": sys.path,
            "descriptor": its_connection.fileno(),
            "functions": functions,
            "memory_bytes": None if memory_gib is None else int(memory_gib * 2**30),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, json.dumps(settings)],
            stdin=nothing,
            pass_fds=[its_connection.fileno()],
            process_group=self._guard.pid,
        )
        its_connection.close()

    def require_started(self) -> None:
        """Wait until the worker has imported the functions. Raises ValueError if it cannot import one of them, and
        LostError if it ends or needs more than `SECONDS_TO_START`.
        """
        answer = self._answer(None, SECONDS_TO_START, "is not imported within {:g} s")
        if ERROR in answer:
            raise ValueError(answer[ERROR])

    def call(self, at: int, arguments: Any, seconds: float) -> Mapping[str, Any]:
        """Call the function number `at`, and return the worker's answer.

        seconds: the time limit of a call. If an object is started again and gets several turns, the limit is the sum
            over these turns.
        """
        try:
            request = bytes(ForkingPickler.dumps((at, arguments)))
        except (RecursionError, TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"{arguments[3]}: the record cannot be sent to a process of rollout.workers "
                f"({first_line(error)}): expected only texts, numbers, lists and dicts, or rollout.workers=0"
            ) from error
        calls, episode = 1, episode_of(arguments)
        if episode is not None:  # a worker without the sample's object makes a new one, which gets all turns
            turns = 1 if episode.number in self._samples else max(1, len(episode.turns))
            calls = turns + episode.wants_reward
            change = self._samples.discard if episode.has_ended else self._samples.add
            change(episode.number)
        times = f"{calls} times " if calls > 1 else ""
        late = f"does not return within {{:g}} s, {times}the value of rollout.worker_timeout,"
        return self._answer(request, seconds * calls, late)

    def _answer(self, request: bytes | None, seconds: float, late: str) -> Mapping[str, Any]:
        """Send a request, and return the answer. If `request` is None, return the worker's first message.

        seconds: the time limit for sending and receiving together.
        late: the message of the error if the limit is exceeded; {} becomes the limit.
        """
        until = time.monotonic() + seconds

        def exists() -> bool:  # programs that the worker has started can keep the connection open after its end
            return self._process.poll() is None

        try:
            if request is not None:
                self._messages.send(request, until, exists)
            answer: Mapping[str, Any] = json.loads(self._messages.receive(until, exists))
        except TimeoutError:
            raise LostError(late.format(seconds)) from None
        except (EOFError, OSError):
            try:
                code = self._process.wait(SECONDS_BETWEEN_LOOKS)
            except subprocess.TimeoutExpired:
                raise LostError("closes the connection of its process") from None
            limit = "" if self._memory_gib is None else f" (its limit is {self._memory_gib:g} GiB of memory)"
            if code < 0:
                raise LostError(f"lets its process end by {signal.Signals(-code).name}{limit}") from None
            hint = limit if code == OUT_OF_MEMORY else ""
            raise LostError(f"ends its process with exit code {code}{hint}") from None
        return answer

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the processes and wait for their end. Must be called only once."""
        self.kill()
        self._process.kill()  # a function can have moved the process out of the group
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._process.wait()
        self._guard.wait()
        self._connection.close()
