"""Hooks for the process of a test: they send it a signal, or make it hang, at a chosen point of its run."""

import functools
import importlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.runs import Command, last_step

from stillhouse import preemption
from stillhouse.loops import training
from stillhouse.output.log import NoLog, RunLog

#: the logs of all ranks
EVERY_RANK = (RunLog, NoLog)


def signal_when(module: str, name: str, number: signal.Signals) -> None:
    """Let the process send itself a signal at a call of a module's function, and make the call take a second."""
    holder = importlib.import_module(module)
    original = getattr(holder, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(1)
        return original(*arguments, **options)

    setattr(holder, name, wrapped)


def interrupt_main_thread() -> None:
    """Interrupt the main thread from another thread as soon as the command handles signals."""
    original = preemption._Listener

    def wrapped(*arguments: Any) -> Any:
        listener = original(*arguments)

        def interrupt() -> None:
            while signal.getsignal(signal.SIGINT) != listener.arrive:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        return listener

    preemption._Listener = wrapped  # type: ignore[assignment, misc]


def interrupt_in(name: str, call: int) -> None:
    """Let the process send itself SIGINT at one call of a function of the training loop. Calls count from 0."""
    original, calls = getattr(training, name), itertools.count()

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    setattr(training, name, wrapped)


def at_step(step: int, act: Callable[[], object], *, logs: Sequence[type] = (RunLog,), before: bool = False) -> None:
    """Let the process act after it has written the line of a step, or before it.

    logs: `RunLog` is the log of rank 0, `NoLog` that of the other ranks.
    """
    for log in logs:

        def train(of_run: Any, at: int, *others: Any, original: Any = log.train) -> None:
            if before and at == step:
                act()
            original(of_run, at, *others)
            if not before and at == step:
                act()

        log.train = train  # type: ignore[attr-defined]


def signal_at(step: int, number: signal.Signals, logs: Sequence[type] = (RunLog,)) -> None:
    at_step(step, lambda: os.kill(os.getpid(), number), logs=logs)


def hang_at_step(step: int) -> None:
    """Let the main thread hang after a step, as in a collective whose other ranks have gone."""
    at_step(step, threading.Event().wait)


def ignoring_signal_at(step: int, number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    signal_at(step, number)


def kill_at(step: int, out: Path, *arguments: str | Path) -> None:
    """Run until the process kills itself at a step; the last line of the log is that step's."""
    command = Command("distill", *arguments, hook=signal_at, hook_arguments=(step, signal.SIGKILL))
    assert command.wait() == -signal.SIGKILL, command.err
    assert last_step(out) == step
