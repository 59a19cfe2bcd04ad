"""Hooks for the process of a test: they send it a signal, make it hang at a chosen point of its run, or record which
samples it trains on.

    ranks = Ranks(1, "distill", …, hook=record_trained, hook_arguments=(str(path),))
    trained(path)                                   after the run has ended, however often it was started

A run that is killed makes the steps after its last checkpoint again, so the same step may have several lines.
"""

import functools
import importlib
import itertools
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.runs import Command, last_step

from stillhouse import preemption
from stillhouse.output.log import NoLog, RunLog


@dataclass(frozen=True)
class TrainedStep:
    """step: from 0. numbers: of its samples. versions: the oldest and the newest that wrote one of their tokens."""

    step: int
    numbers: list[int]
    versions: tuple[int, int]


def record_trained(path: str) -> None:
    """A hook of a run's processes."""
    from stillhouse.rollout.rollout import Rollout

    take, trained = Rollout.take, Rollout.trained
    taken: dict[str, Any] = {}

    def taking(rollout: Rollout, step: int, *others: Any) -> Any:
        samples = take(rollout, step, *others)
        versions = [sample.completion.versions_N[sample.is_generated_N] for sample in samples]
        oldest, newest = min(version.min() for version in versions), max(version.max() for version in versions)
        numbers = [sample.number for sample in samples]
        taken.update(step=step, numbers=numbers, versions=[int(oldest), int(newest)])
        return samples

    def recording(rollout: Rollout, step: int) -> None:
        trained(rollout, step)
        if os.environ.get("RANK", "0") == "0":
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (json.dumps(taken) + "\n").encode())  # one call: a kill leaves a whole line or none
            os.close(file)

    Rollout.take, Rollout.trained = taking, recording  # type: ignore[method-assign]


def trained(path: Path) -> list[TrainedStep]:
    """The steps whose updates are in the final weights: of each step the last one, as later steps follow from it."""
    steps: dict[int, TrainedStep] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        steps = {step: kept for step, kept in steps.items() if step < record["step"]}
        steps[record["step"]] = TrainedStep(record["step"], record["numbers"], tuple(record["versions"]))
    return list(steps.values())


def wrong_in(steps: list[TrainedStep], count: int, samples: int, max_staleness: int) -> str:
    """What is wrong with a run's steps: "" if each of `samples` samples was trained exactly once, none too old."""
    if [step.step for step in steps] != list(range(count)):
        return f"steps {[step.step for step in steps]}, expected 0 to {count - 1}"
    counts = Counter(number for step in steps for number in step.numbers)
    if twice := sorted(number for number, times in counts.items() if times > 1):
        return f"samples {twice} were trained more than once"
    if lost := sorted(set(range(samples)) ^ counts.keys()):
        return f"samples {lost} were not trained, or are none of this run"
    for step in steps:
        oldest, newest = step.versions
        if not step.step - max_staleness <= oldest <= newest <= step.step:
            return f"step {step.step} has tokens of versions {oldest} to {newest}; the bound is {max_staleness}"
    return ""


#: the logs of all ranks
EVERY_RANK = (RunLog, NoLog)


def signal_when(module: str, name: str, number: signal.Signals, call: int | None = None) -> None:
    """Let the process send itself a signal at each call of a module's function, which then takes a second, or at one.

    call: the number of this one, from 0.
    """
    holder, calls = importlib.import_module(module), itertools.count()
    original = getattr(holder, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if call in (None, next(calls)):
            os.kill(os.getpid(), number)
            time.sleep(call is None)
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
