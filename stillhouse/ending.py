"""Ends a process without waiting for its main thread, also if torchrun is gone, and formats its error line."""

import os
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

#: how many seconds to wait while buffered output is written to stdout
FLUSH_SECONDS = 1.0
#: how many seconds a command that has done its work waits for threads of other code
SECONDS_FOR_THREADS = 30.0
#: how often a process looks for torchrun, and how much later than the first process of a machine the others end, so
#: that the first one does not report that it has lost contact with them
SECONDS_BETWEEN_LOOKS = 0.5


def error_line(message: str) -> str:
    """An error as every command prints it, with the rank's number if that is not 0."""
    rank = os.environ.get("RANK", "0")
    return f"error: {message}" if rank == "0" else f"error on rank {rank}: {message}"


def print_line(line: str) -> None:
    """Print a line on stderr, bypassing Python's buffers, whose locks the main thread may hold."""
    start = "\n" if os.isatty(2) else ""  # start below the live line of a run
    with suppress(OSError):  # the reader may be gone
        os.write(2, f"{start}{line}\n".encode())


def end_process(code: int, line: str | None) -> NoReturn:
    """End this process from any thread, without unwinding the stack. line: printed on stderr first.

    No file is left half-written under its final name, because files are written under another name and renamed.
    """
    flush = threading.Thread(target=_flush, daemon=True)  # a thread, since it may block on a lock of the main thread
    flush.start()
    flush.join(FLUSH_SECONDS)
    if line is not None:
        print_line(line)
    os._exit(code)


def end_without_threads(code: int) -> None:
    """Call this last: it ends the process with this exit code if threads of other code do not end by themselves.

    Python waits for every thread that is no daemon, such as one in which a reward hangs, and signals are ignored by
    then.
    """
    threading.Thread(target=_end_without_threads, args=(code,), daemon=True).start()


def _end_without_threads(code: int) -> None:
    time.sleep(SECONDS_FOR_THREADS)
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if names:
        which = ascii(", ".join(names))
        end_process(code, f"warning: the process ends without the threads {which}, which do not end by themselves")


def _flush() -> None:
    with suppress(OSError, ValueError):  # ValueError: the stream is closed
        sys.stdout.flush()


def end_with_launcher() -> None:
    """Let this process end at once when torchrun, its parent, is gone. Without torchrun this does nothing.

    torchrun stops its processes before it ends, unless it is killed by SIGKILL or by the kernel when memory runs out.
    Without this check, its processes would then go on training, occupy their devices and keep the run's folder
    locked. The operating system gives a process whose parent is gone another parent. A thread looks for that: unlike
    Linux's `prctl(PR_SET_PDEATHSIG)`, this works on every system, and also if the thread that started the process
    ends earlier.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_watch_launcher, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    line = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        line = error_line(
            f"torchrun (process {launcher}), which started this process, is gone; a run continues from its last "
            "checkpoint"
        )
    else:
        time.sleep(2 * SECONDS_BETWEEN_LOOKS)
    end_process(1, line)
