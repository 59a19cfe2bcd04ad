"""The main function of a worker process: it imports the user's functions and answers calls until its run ends.

`worker_pool.py` starts it. Requests come pickled from the run, because records may have values that JSON lacks.
Answers are JSON, so that the run never unpickles what a function returns.
"""

import json
import os
import signal
import socket
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from stillhouse.hashing import file_hash
from stillhouse.memory_limit import limit_memory
from stillhouse.user_code.messages import Messages
from stillhouse.user_code.tools import answer_of

#: the keys of an answer: a result; the message of an error; a reason for which the process is not usable any more
VALUE, ERROR, UNUSABLE = "value", "error", "unusable"
#: the exit code of a process that cannot hold a request or its answer
OUT_OF_MEMORY = 79
#: the folders of installed modules
_INSTALLED = {"site-packages", "dist-packages"}


def serve(settings: Mapping[str, Any]) -> NoReturn:
    """Answer calls one by one. settings: `descriptor` of the connection, `functions` as pairs of configuration key
    and path, `memory_bytes` that the process may allocate in addition to what it has, or None.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # the run decides when its workers end; programs that a function starts get the default handlers
        signal.signal(number, lambda *_: None)
    messages = Messages(socket.socket(fileno=settings["descriptor"]))
    try:
        is_limited = settings["memory_bytes"] is not None
        calls = [answer_of(key, path, is_limited=is_limited) for key, path in settings["functions"]]
    except ValueError as error:
        _send(messages, {ERROR: str(error)})
        os._exit(1)
    if settings["memory_bytes"] is not None:
        limit_memory(settings["memory_bytes"])
    _send(messages, {VALUE: None})
    try:
        while True:
            at, arguments = ForkingPickler.loads(messages.receive())
            _send(messages, _answer(calls[at], arguments, is_limited=is_limited))
    except (EOFError, ConnectionError):  # the run has closed the connection
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


def _answer(call: Callable[..., Any], arguments: Any, *, is_limited: bool) -> dict[str, Any]:
    try:
        answer = {VALUE: call(*arguments)}
    except ValueError as error:
        ran_out = is_limited and isinstance(error.__cause__, MemoryError)
        answer = {UNUSABLE if ran_out else ERROR: str(error)}
    with suppress(OSError, ValueError):  # a function may have closed it
        sys.stdout.flush()
    return answer


def source_hashes(named: Collection[str]) -> dict[str, str]:
    """The sha256 of the source files of imported modules, by module: of those in `named`, and of all modules whose
    package is not installed. "" for a file that cannot be read.
    """
    files = {
        name: Path(file)
        for name, module in sorted(sys.modules.items())
        if isinstance(module, ModuleType) and isinstance(file := vars(module).get("__file__"), str)
    }
    hashes = {}
    for name, file in files.items():
        # a package may make modules elsewhere, as torch.compile does
        package = files.get(name.partition(".")[0], file)
        if name in named or (file.suffix == ".py" and not _is_installed(package)):
            try:
                hashes[name] = file_hash(file)
            except OSError:
                hashes[name] = ""
    return hashes


def _is_installed(file: Path) -> bool:
    standard = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    # a virtual environment may see packages of another Python, in other folders than its own
    return not _INSTALLED.isdisjoint(file.parts) or any(map(file.is_relative_to, standard))


def _send(messages: Messages, answer: Mapping[str, Any]) -> None:
    messages.send(json.dumps(answer).encode())
