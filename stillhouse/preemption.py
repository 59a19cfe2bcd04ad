"""Handles signals that end a command: Ctrl-C, and signals by which SLURM, Kubernetes and torchrun announce a stop.

The command line handles SIGINT, SIGTERM, SIGHUP and SIGUSR1 (`handling`):

    the first signal    Within `finishing`, it is only recorded. The training loop calls `requested` after each step,
                        writes a checkpoint and raises `Preempted`. Outside `finishing` it ends the process at once.
    the second signal   Ends the process at once.

Ctrl-C may also end the process that reads the output (`tee`), so that writing the output fails. The run still writes
its checkpoint in this case (`surviving_lost_reader`). A function of the user (such as a reward) that does not return
soon after a signal within `finishing` is interrupted (`interruptible`). A warning names each function of the user
that has run for a minute, also without a signal. The line that reports a signal names the function that is running.

The exit code is 128 + the signal's number; only a server that has answered all requests ends with 0. A thread reads
the signals, because Python runs signal handlers only in the main thread, which may be waiting in a collective that
never ends. Signals that were ignored when the process started (`nohup`, background jobs) stay ignored. If the library
is used without the command line, it installs no handlers, and signals have their usual effects.
"""

import errno
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

from stillhouse.process import end_process, print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
#: in a process that torchrun started, signals within this many seconds count as one: SLURM's `scancel` and
#: `srun` signal every process of a job step, and torchrun also forwards its own signal to its processes
REPEATED_SECONDS = 1.0

#: Ctrl-C in a terminal ends the process that reads a run's output, and also signals the run. If writing the output
#: fails, the run waits this many seconds for the signal
SECONDS_OF_LOST_READER = 2.0
#: after a signal, the user's functions may run for this many seconds in total; then the running function is
#: interrupted. If it has not returned after as many more seconds, the process ends without a checkpoint
SECONDS_TO_RETURN = 5.0
#: the signal that interrupts a function in the main thread. If it arrives after the handler was removed, it has no
#: effect, because the default action for this signal is to ignore it
_INTERRUPT = signal.SIGURG
#: after a signal, the main thread gets `_YIELD` whenever it has used `_YIELD_SECONDS` of processor time in a function
#: of the user. A long operation in C, such as a regular expression, holds the GIL and so blocks the thread that reads
#: the signals, but it runs signal handlers; the handler of `_YIELD` releases the GIL
_YIELD, _YIELD_SECONDS = signal.SIGVTALRM, 0.2
_MILLISECONDS_BETWEEN_LOOKS = 200
#: a warning names a function of the user when one call has run for `SECONDS_UNTIL_NAMED`. A thread checks this every
#: `SECONDS_BETWEEN_LOOKS`. During a call, the main thread gets `_YIELD`, so that the checking thread can run
SECONDS_UNTIL_NAMED, SECONDS_BETWEEN_LOOKS = 60.0, 5.0

_OUTPUTS = (1, 2)

T = TypeVar("T")

_listener: "_Listener | None" = None


class Preempted(Exception):
    """The run stopped because of a signal. All ranks raise this after the same step.

    checkpoint: the path of the checkpoint that the run wrote; None if the run did not finish its first step.
    """

    def __init__(self, number: int, step: int, checkpoint: Path | None):
        where = "before its first step was finished" if checkpoint is None else f"after step {step}"
        saved = "" if checkpoint is None else f"; checkpoint {checkpoint}"
        super().__init__(f"stopped by {signal.Signals(number).name} {where}{saved}")
        self.number, self.checkpoint = number, checkpoint


class OverdueError(BaseException):
    """A function of the user did not return in time after a signal. The class is a BaseException, so that an `except
    Exception` in the function does not catch it.
    """


@contextmanager
def handling(message: Callable[[int], str], *, ends_process: bool = False) -> Iterator[None]:
    """Handle signals until the block ends. Only the main thread can install handlers; in another thread, this does
    nothing.

    message: a function of a signal's number that returns the line to print if the signal ends the process at once.
    ends_process: whether the process ends after the block. If it is true, signals after the block are ignored, so
        that they cannot change the exit code. If it is false, the previous handlers are restored.
    """
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    _listener = _Listener(message)
    descriptor = signal.set_wakeup_fd(_listener.wakeup.fileno(), warn_on_full_buffer=False)
    # the handler of `_YIELD` sleeps, so that the thread that reads the signals can run
    handlers: dict[signal.Signals, Callable[..., object]] = {
        _INTERRUPT: _listener.interrupt,
        _YIELD: lambda *_: time.sleep(0.001),
        **dict.fromkeys(handled, _listener.arrive),  # only signals with Python handlers are written to the descriptor
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if ends_process and number in SIGNALS else handler)
        signal.set_wakeup_fd(descriptor)
        _listener.close()
        _listener = None


@contextmanager
def finishing(what: str) -> Iterator[None]:
    """Within the block, only record the first signal, and print that `what` is finished before the process ends."""
    listener = _listener
    if listener is None:
        yield
        return
    listener.finishing = what
    try:
        yield
    finally:
        listener.finishing = None


def interruptible(what: str, work: Callable[[], T], about: str = "", advice: str = "") -> T:
    """Call `work`, a function of the user that may never return.

    Within `finishing`, OverdueError is raised inside `work` `SECONDS_TO_RETURN` after a signal. If `work` has not
    returned after as many more seconds, the process ends. Outside `finishing`, a signal ends the process at once.
    Only the main thread can be interrupted, and only between two instructions of Python, in a system call, or in C
    code that checks for signals, such as a regular expression. Only SIGKILL ends C code that neither checks for
    signals nor releases the GIL.

    what: the function's name.
    about, advice: details of the call, and advice to the user, for the warning after `SECONDS_UNTIL_NAMED`.
    """
    listener = _listener
    if listener is None or threading.current_thread() is not threading.main_thread():
        return work()
    listener.enter(what, f"{what} has run for {SECONDS_UNTIL_NAMED:g} s{about}, and the run waits for it{advice}")
    try:
        try:
            return work()
        finally:
            listener.leave()
    finally:
        listener.leave()  # a second time, because OverdueError may have been raised just before the first call
        listener.require_in_time(what)


@contextmanager
def surviving_lost_reader() -> Iterator[None]:
    """Ignore a failed write to the output if a signal has arrived or arrives within `SECONDS_OF_LOST_READER`.

    The signal may end the process that reads the output, such as `tee`, before this process receives it.
    """
    try:
        yield
    except OSError as error:
        is_lost = error.errno in (errno.EPIPE, errno.EIO)
        if not is_lost or _listener is None or not _listener.noted.wait(SECONDS_OF_LOST_READER):
            raise


def requested() -> int:
    """Return the number of the signal that this process has received; 0 without a signal, or outside `handling`. If
    the handler has run in the main thread, first wait until the listener's thread has read the signal.
    """
    if (listener := _listener) is None:
        return 0
    if listener.has_arrived:
        listener.noted.wait()
    return listener.received


class _Listener:
    """A thread that reads the numbers of signals as they arrive."""

    def __init__(self, message: Callable[[int], str]):
        self.finishing: str | None = None
        self.received, self._received_at = 0, 0.0
        self.has_arrived, self.noted = False, threading.Event()  # noted: set when a signal was received
        self._function: str | None = None  # the user's function that is running
        self._late = ""  # the line to print if the running function does not return soon
        self._entered_at = self._spent = 0.0  # _spent: seconds after the signal in functions that have returned
        self._is_interrupted = False  # whether the running (or last) function was interrupted
        self._message = message
        self._inbox, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def arrive(self, *_: object) -> None:
        """Record that a signal has arrived. The main thread runs this handler as soon as it executes Python code."""
        self.has_arrived = True
        if self._function is not None:
            _set_timer(_YIELD_SECONDS)

    def enter(self, function: str, late: str) -> None:
        """Record that a function of the user begins. Raises OverdueError if `SECONDS_TO_RETURN` are already used up.

        late: the line to print if the function does not return soon.
        """
        if self.received and self._spent > SECONDS_TO_RETURN:
            raise OverdueError(f"{function} was not called after a signal")
        self._is_interrupted, self._entered_at, self._late = False, time.monotonic(), late
        self._function = function
        _set_timer(_YIELD_SECONDS if self.has_arrived else SECONDS_BETWEEN_LOOKS)

    def leave(self) -> None:
        function, self._function = self._function, None
        _set_timer(0)
        if self.received and function is not None:
            self._spent += self._since_signal()

    def interrupt(self, *_: object) -> None:
        """Handle `_INTERRUPT` in the main thread: raise OverdueError in the function of the user that is running."""
        if self._function is not None:
            self.require_in_time(self._function)

    def require_in_time(self, function: str) -> None:
        """Raise OverdueError if the function was interrupted. The function may have caught the first OverdueError, so
        `interruptible` calls this again after the function.
        """
        if self._is_interrupted:
            raise OverdueError(f"{function} has not returned {SECONDS_TO_RETURN:g} s after a signal")

    def close(self) -> None:
        # close() is not enough: a forked process may still have this socket open, and the thread would wait for ever
        self.wakeup.shutdown(socket.SHUT_RDWR)
        self.wakeup.close()
        self._thread.join()
        self._inbox.close()

    def _listen(self) -> None:
        while True:
            function = self._function
            if self.received and function is not None:
                spent = self._spent + self._since_signal()
                if spent > 2 * SECONDS_TO_RETURN:  # the interruption has had no effect
                    line = f"{function} does not return; {self._message(self.received)}"
                    end_process(128 + self.received, line if _is_rank_0() else None)
                if spent > SECONDS_TO_RETURN and not self._is_interrupted:
                    self._is_interrupted = True
                    main = threading.main_thread().ident
                    assert main is not None
                    signal.pthread_kill(main, _INTERRUPT)
            entered_at, late = self._entered_at, self._late
            is_due = late and self._function is not None and time.monotonic() - entered_at > SECONDS_UNTIL_NAMED
            if is_due and entered_at == self._entered_at:  # not equal if another call has begun meanwhile
                self._late = ""
                print_line(f"warning: {late}")
            looks = _MILLISECONDS_BETWEEN_LOOKS if self.received else 1000 * SECONDS_BETWEEN_LOOKS
            for descriptor, _ in self._poll.poll(looks):
                if descriptor in _OUTPUTS:
                    self._poll.unregister(descriptor)
                    # redirect the output to the null device, because the process that reads it has ended
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, descriptor)
                    os.close(null)
                    continue
                numbers = self._inbox.recv(64)
                if not numbers:  # closed
                    return
                for number in numbers:
                    if number in SIGNALS:
                        self._receive(number)

    def _since_signal(self) -> float:
        return time.monotonic() - max(self._entered_at, self._received_at)

    def _receive(self, number: int) -> None:
        now, finishing = time.monotonic(), self.finishing
        if self.received and "RANK" in os.environ and now - self._received_at <= REPEATED_SECONDS:
            return
        function = self._function  # a copy, because the main thread may set `_function` to None meanwhile
        if self.received or finishing is None:
            was_running = "" if function is None else f"; {function} was running"
            end_process(128 + number, self._message(number) + was_running if _is_rank_0() else None)
        self.received, self._received_at = number, now
        # Ctrl-C also ends a `tee` that reads the output, and SIGHUP means that the terminal is closed. In both cases,
        # writing to the output fails; this must not prevent the checkpoint.
        for descriptor in _OUTPUTS:
            self._poll.register(descriptor, 0)  # with 0, the poll reports only errors
        if _is_rank_0():
            name = signal.Signals(number).name
            running = "" if function is None else f"; {function} is running"
            print_line(f"{name}: finishing {finishing}; a second signal ends the run at once{running}")
        self.noted.set()


def _set_timer(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"
