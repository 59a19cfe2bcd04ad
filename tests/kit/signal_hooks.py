"""Hooks for the process of a test: they send it a signal, or make it hang, at a chosen point."""

import functools
import importlib
import itertools
import os
import signal
import threading
import time
from typing import Any

from test_train_resume import signal_at

from stillhouse import preemption
from stillhouse.loops import training
from stillhouse.output.log import RunLog


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


def hang_at_step(step: int) -> None:
    """Let the main thread hang after a step, as in a collective whose other ranks have gone."""
    original = RunLog.train

    @functools.wraps(original)
    def wrapped(log: RunLog, at: int, *others: Any) -> None:
        original(log, at, *others)
        if at == step:
            threading.Event().wait()

    RunLog.train = wrapped  # type: ignore[method-assign]


def ignoring_signal_at(step: int, number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    signal_at(step, number)
