"""Prints error lines, ends the process (even if threads hang, or when torchrun has ended), and limits its memory."""

import os
import resource
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from stillhouse.display import escaped

#: the maximum number of seconds to wait while buffered output is written to stdout
FLUSH_SECONDS = 1.0
#: the maximum number of seconds that a finished command waits for threads of libraries and of the user's functions
SECONDS_FOR_THREADS = 30.0
#: seconds between two checks whether torchrun still runs. If torchrun has ended, local rank 0 ends first, and the
#: other ranks wait for twice this time, so that local rank 0 does not report a lost connection
SECONDS_BETWEEN_LOOKS = 0.5


def error_line(message: str) -> str:
    """Return the line that every command prints for an error, with the rank's number if this is not rank 0."""
    rank = os.environ.get("RANK", "0")
    return f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}"


def print_line(line: str) -> None:
    """Print a line on stderr without Python's buffers, because the main thread may have locked them."""
    start = "\n" if os.isatty(2) else ""  # on a terminal, begin below the progress line of a run
    with suppress(OSError):  # the reader of stderr may have ended
        os.write(2, f"{start}{escaped(line, lines=True)}\n".encode())


def end_process(code: int, line: str | None) -> NoReturn:
    """End this process from any thread, without unwinding the stack.

    No incomplete file remains under its final name, because files are written under another name and then renamed.

    line: a line to print on stderr first.
    """

    def flush() -> None:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            sys.stdout.flush()

    # flush in a thread with a time limit, because the main thread may hold the lock of stdout for ever
    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    thread.join(FLUSH_SECONDS)
    if line is not None:
        print_line(line)
    os._exit(code)


def end_without_threads(code: int) -> None:
    """Start a thread that ends the process with this exit code if other threads do not end in time. Call this last.

    Without this thread, Python would wait for every non-daemon thread, for example for a reward function that hangs.
    Ctrl-C could not end this wait, because signals are already ignored.
    """

    def end() -> None:
        time.sleep(SECONDS_FOR_THREADS)
        main = threading.main_thread()
        names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
        if names:
            which = ascii(", ".join(names))
            line = f"warning: the process ends, although these threads have not ended by themselves: {which}"
            end_process(code, line)

    threading.Thread(target=end, daemon=True).start()


def end_with_launcher() -> None:
    """Start a thread that ends this process when its parent torchrun has ended. Without torchrun this does nothing.

    torchrun stops its processes before it ends, except when SIGKILL ends torchrun, for example when memory runs out.
    Then its processes would continue training, occupy their devices and keep the run's folder locked. The thread
    detects this by the parent's process id, which the operating system changes when the parent ends. This works on
    every system. Linux's `prctl(PR_SET_PDEATHSIG)` would also end this process when only the thread of torchrun that
    started it ends.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    line = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = error_line(
            f"torchrun (process {launcher}), which started this process, has ended; the same command continues the "
            "run from its last checkpoint"
        )
    else:
        time.sleep(2 * SECONDS_BETWEEN_LOOKS)
    end_process(1, line)


def limit_memory(more: int) -> None:
    """Limit data and stack to their present size plus `more` bytes; without /proc/self/statm, do nothing. Allocations
    above the limit raise MemoryError.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[5])  # the pages of data and stack
    except OSError:
        return
    limit = pages * resource.getpagesize() + more
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
