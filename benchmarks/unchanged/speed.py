"""Measures the time of a training step of two versions, side by side.

Each version trains the same run in a process of its own. The processes take turns, step by step, because the speed of
a shared machine drifts: after each optimizer step a process waits until the harness lets it go on. So a turn has the
end of one step (its line in the log) and the next step up to its update. The result is the median over rounds of
new/old of neighbouring turns, in CPU seconds of all threads, in which waiting for a busy machine does not count.
"""

import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.unchanged.cases import MEDIUM, Case
from benchmarks.unchanged.runs import RunError, Tree

#: turns of each process that are not counted
WARM_UP = 2


class SteppedRun:
    """A run that makes one step at a time."""

    def __init__(self, tree: Tree, folder: Path, out: str):
        self.connection, gate = multiprocessing.Pipe()
        self.command = tree.start(folder, "distill", "run.yaml", f"out={out}", name=out, gate=gate)
        gate.close()  # the process has its own copy

    def __enter__(self) -> Self:
        self.receive()
        return self

    def __exit__(self, *_: object) -> None:
        self.command.kill()
        self.connection.close()

    def step(self) -> tuple[float, float]:
        """Make one step. Returns its seconds, by the clock and of all threads on the CPU."""
        self.connection.send(None)
        return self.receive()

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except EOFError:
            raise RunError(self.command.error()) from None


def measure_speed(before: Tree, after: Tree, folder: Path, rounds: int, tokens: int) -> dict[str, Any]:
    case = speed_case(rounds, tokens)
    case.write(folder)
    seconds: dict[str, list[tuple[float, float]]] = {"old": [], "new": []}
    with SteppedRun(before, folder, "old") as old, SteppedRun(after, folder, "new") as new:
        runs = {"old": old, "new": new}
        for turn in range(WARM_UP + rounds):
            for name in list(runs) if turn % 2 else list(reversed(runs)):
                seconds[name].append(runs[name].step())
            wall, cpu = (seconds["new"][-1][at] / seconds["old"][-1][at] for at in (0, 1))
            print(
                f"round {turn - WARM_UP + 1:3}: new/old {cpu:.3f} of CPU seconds, {wall:.3f} of seconds", flush=True
            )
    counted = {name: turns[WARM_UP:] for name, turns in seconds.items()}
    return {
        "cpu": ratios(*([turn[1] for turn in counted[name]] for name in ("old", "new"))),
        "wall": ratios(*([turn[0] for turn in counted[name]] for name in ("old", "new"))),
        "settings": case.values(),
    }


def speed_case(rounds: int, tokens: int) -> Case:
    steps = {
        "train.tokens_per_step": tokens,
        "train.micro_batch_tokens": min(tokens, 1024),
        "train.steps": WARM_UP + rounds + 2,
    }
    return replace(MEDIUM, settings={**MEDIUM.settings, **steps})


def ratios(old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    of_rounds = [after / before for before, after in zip(old, new, strict=True)]
    return {
        "new/old": statistics.median(of_rounds),
        "quartiles": statistics.quantiles(of_rounds, n=4),
        "new/old of minima": min(new) / min(old),
        "seconds_old": [round(value, 4) for value in old],
        "seconds_new": [round(value, 4) for value in new],
    }
