"""The end of a process that cannot wait for its main thread, and the form of the line that says why."""

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

#: seconds in which what is still buffered for stdout may be written
FLUSH_SECONDS = 1.0


def error_line(message: str) -> str:
    """An error as every command prints it; of a rank other than 0 with the rank's number."""
    rank = os.environ.get("RANK", "0")
    return f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}"


def print_line(line: str) -> None:
    """On stderr, around Python's buffers, whose locks the main thread may hold."""
    start = "\n" if os.isatty(2) else ""  # below the live line of a run
    with suppress(OSError):  # nobody reads it
        os.write(2, f"{start}{line}\n".encode())


def end_process(code: int, line: str | None) -> NoReturn:
    """End this process from any thread, without unwinding. line: printed on stderr first.

    Nothing is left half done, because files are written under another name and then renamed.
    """
    flush = threading.Thread(target=_flush, daemon=True)  # may have to wait for the main thread
    flush.start()
    flush.join(FLUSH_SECONDS)
    if line is not None:
        print_line(line)
    os._exit(code)


def _flush() -> None:
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        sys.stdout.flush()
