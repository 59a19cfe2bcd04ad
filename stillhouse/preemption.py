"""Handles signals that end a command: Ctrl-C, and those of SLURM, Kubernetes and torchrun before they stop a job.

The command line handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 (`handling`):

    the first signal    Is only recorded within `finishing`: the training loop reads `requested` after each step,
                        writes a checkpoint and raises `Preempted`. Outside `finishing` it ends the process at once.
    the second signal   Ends the process at once.

A function of the user's own that does not return within `finishing` is ended, too (`interruptible`).

In all these cases the exit code is 128 + the signal's number. A thread reads the signals, because Python runs signal
handlers only in the main thread, which may be waiting in a collective that never ends. Signals that were ignored when
the process started (`nohup`, background jobs) stay ignored. If the library is used without the command line, it
installs no handlers and signals keep their meaning.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from stillhouse.ending import end_process, print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: in a process that torchrun started, signals within this many seconds count as one: SLURM's `scancel` and `srun`
#: signal every process of a job step, and torchrun forwards its own signal to its processes
REPEATED_SECONDS = 1.0

#: how many seconds the user's own functions may run after a signal, all together; after as many more, the process
#: ends without a checkpoint
SECONDS_TO_RETURN = 5.0
#: sent to the main thread to end a function. By default it has no effect, so it is harmless if it comes too late
_INTERRUPT = signal.SIGURG
#: Sent to the main thread after a signal, each time that the process has computed for `_YIELD_SECONDS` within a
#: function. One long operation of C, such as a regular expression, lets no other thread run, but handles signals.
_YIELD, _YIELD_SECONDS = signal.SIGVTALRM, 0.2
_MILLISECONDS_BETWEEN_LOOKS = 200

_OUTPUTS = (1, 2)

T = TypeVar("T")

_listener: "_Listener | None" = None


class Preempted(Exception):
    """The run stopped because of a signal, after it wrote a checkpoint. All ranks raise this after the same step.

    checkpoint: None if the run has not finished its first step, so that there is nothing to save.
    """

    def __init__(self, number: int, step: int, checkpoint: Path | None):
        where = "before its first step was finished" if checkpoint is None else f"after step {step}"
        saved = "" if checkpoint is None else f"; checkpoint {checkpoint}"
        super().__init__(f"stopped by {signal.Signals(number).name} {where}{saved}")
        self.number, self.checkpoint = number, checkpoint


class OverdueError(BaseException):
    """A signal came, and a function of the user's own did not return in time. It is not an Exception, so that an
    `except Exception` of the function does not keep it.
    """


@contextmanager
def handling(message: Callable[[int], str], *, ends_process: bool = False) -> Iterator[None]:
    """Handle signals until the block ends.

    message: makes, from the signal's number, the line that a process prints when a signal ends it at once.
    ends_process: ignore signals after the block, so that they cannot change the exit code; otherwise the former
    handlers are restored. Only the main thread can install handlers; in another thread this does nothing.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    handled = [number for number in SIGNALS if before[number] is not signal.SIG_IGN]
    _listener = _Listener(message)
    descriptor = signal.set_wakeup_fd(_listener.descriptor, warn_on_full_buffer=False)
    for number in handled:
        signal.signal(number, _listener.arrive)  # only a signal with a Python handler is written to the descriptor
    of_functions = {_INTERRUPT: _listener.interrupt, _YIELD: _yield}
    before_functions = {number: signal.signal(number, handler) for number, handler in of_functions.items()}
    try:
        yield
    finally:
        for number, handler in before_functions.items():
            signal.signal(number, handler)
        for number in handled:
            signal.signal(number, signal.SIG_IGN if ends_process else before[number])
        signal.set_wakeup_fd(descriptor)
        _listener.close()
        _listener = None


@contextmanager
def finishing(what: str) -> Iterator[None]:
    """Within the block, the first signal is only recorded, and a line is printed: `what` will be finished first."""
    listener = _listener
    if listener is None:
        yield
        return
    listener.finishing = what
    try:
        yield
    finally:
        listener.finishing = None


def interruptible(what: str, work: Callable[[], T]) -> T:
    """The result of `work`, a function of the user's own that may never return. what: its name.

    Within `finishing`, OverdueError is raised in it `SECONDS_TO_RETURN` after a signal; if it still does not return,
    the process ends after the same time again. Elsewhere a signal ends the process at once. Only the main thread can
    be interrupted, and only between two instructions of Python, in a system call, or where an operation of C looks
    for signals, as a regular expression does. An operation of C that neither looks for signals nor lets other threads
    run can only be ended by SIGKILL.
    """
    listener = _listener
    if listener is None or threading.current_thread() is not threading.main_thread():
        return work()
    listener.enter(what)
    try:
        try:
            return work()
        finally:
            listener.leave()
    finally:
        listener.leave()  # again: the error may have been raised right before the line above
        listener.require_in_time(what)


def handles_signals() -> bool:
    """Whether this process handles signals as described above, so that none of them raises KeyboardInterrupt."""
    return _listener is not None


def requested() -> int:
    """The number of the signal that this process has received; 0 if there was none or signals are not handled."""
    return 0 if _listener is None else _listener.received()


class _Listener:
    """A thread that reads the numbers of signals as they arrive."""

    def __init__(self, message: Callable[[int], str]):
        self.finishing: str | None = None
        self._received, self._received_at = 0, 0.0
        self._arrived, self._noted = False, threading.Event()
        self._function: str | None = None  # the user's function that runs now
        self._entered_at = self._spent = 0.0  # spent: the seconds of such functions since the signal, but of this one
        self._is_interrupted = False  # whether the function that runs, or ran last, was interrupted
        self._message = message
        self._inbox, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        return self._wakeup.fileno()

    def arrive(self, *_: object) -> None:
        """The signal handler. The main thread calls it as soon as it executes Python code."""
        self._arrived = True
        if self._function is not None:
            _set_timer(_YIELD_SECONDS)

    def received(self) -> int:
        """The number of the received signal, or 0. If the main thread's handler has run, this first waits until the
        thread has read that signal.
        """
        if self._arrived:
            self._noted.wait()
        return self._received

    def enter(self, function: str) -> None:
        """A function of the user's own begins. Raises OverdueError if others have used its time up."""
        if self._received and self._spent > SECONDS_TO_RETURN:
            raise OverdueError(f"{function} was not called after a signal")
        self._is_interrupted, self._entered_at = False, time.monotonic()
        self._function = function
        if self._arrived:
            _set_timer(_YIELD_SECONDS)

    def leave(self) -> None:
        function, self._function = self._function, None
        if self._arrived:
            _set_timer(0)
        if self._received and function is not None:
            self._spent += self._since_signal()

    def interrupt(self, *_: object) -> None:
        """The handler of `_INTERRUPT`, in the main thread."""
        if self._function is not None:
            self.require_in_time(self._function)

    def require_in_time(self, function: str) -> None:
        """Raise OverdueError if the function was interrupted: it may have caught the first one and given a result."""
        if self._is_interrupted:
            raise OverdueError(f"{function} has not returned {SECONDS_TO_RETURN:g} s after a signal")

    def close(self) -> None:
        # closing is not enough: a forked process that is still alive holds this end open, and the thread would wait
        self._wakeup.shutdown(socket.SHUT_RDWR)
        self._wakeup.close()
        self._thread.join()
        self._inbox.close()

    def _listen(self) -> None:
        while True:
            if self._received:
                self._end_function()
            for descriptor, _ in self._poll.poll(_MILLISECONDS_BETWEEN_LOOKS if self._received else None):
                if descriptor in _OUTPUTS:
                    self._poll.unregister(descriptor)
                    _discard(descriptor)
                    continue
                numbers = self._inbox.recv(64)
                if not numbers:  # closed
                    return
                for number in numbers:
                    if number in SIGNALS:
                        self._receive(number)

    def _since_signal(self) -> float:
        """The seconds of the present function since the signal."""
        return time.monotonic() - max(self._entered_at, self._received_at)

    def _end_function(self) -> None:
        """Interrupt the user's function, or end the process, if its time is over."""
        function = self._function
        if function is None:
            return
        spent = self._spent + self._since_signal()
        if spent > 2 * SECONDS_TO_RETURN:
            line = f"{function} does not return; {self._message(self._received)}"
            end_process(128 + self._received, line if _is_rank_0() else None)
        if spent > SECONDS_TO_RETURN and not self._is_interrupted:
            self._is_interrupted = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, _INTERRUPT)

    def _receive(self, number: int) -> None:
        now, finishing = time.monotonic(), self.finishing
        if self._received and "RANK" in os.environ and now - self._received_at <= REPEATED_SECONDS:
            return
        if self._received or finishing is None:
            end_process(128 + number, self._message(number) if _is_rank_0() else None)
        self._received, self._received_at = number, now
        # Ctrl-C also ends a `tee` that reads the output, and SIGHUP means that the terminal is gone. In both cases
        # writing to the output fails, which must not prevent the checkpoint.
        for descriptor in _OUTPUTS:
            self._poll.register(descriptor, 0)  # reports only errors
        if _is_rank_0():
            name = signal.Signals(number).name
            print_line(f"{name}: finishing {finishing}; a second signal ends the run at once")
        self._noted.set()


def _yield(*_: object) -> None:
    """The handler of `_YIELD`: let the thread that reads the signals run."""
    time.sleep(0.001)


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _discard(descriptor: int) -> None:
    """Redirect a descriptor whose reader is gone to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
