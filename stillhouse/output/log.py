"""The output of a run: metrics.jsonl, a live line on a terminal, and the trackers that `track` names."""

import hashlib
import json
import math
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from stillhouse.display import escaped, named_if_slow
from stillhouse.output.disk import explained_write_errors
from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import append, without_infinity
from stillhouse.output.metrics import LENGTH, WITHOUT_BEST, metric_table
from stillhouse.output.progress import Progress
from stillhouse.output.tracking import open_trackers
from stillhouse.parallel import Ranks, watchdog
from stillhouse.preemption import surviving_lost_reader

#: the minimum seconds between two printed steps if the output is not a terminal (terminals have a live line)
_PLAIN_EVERY = 10.0


def open_log(
    folder: RunFolder,
    progress: Progress,
    steps: int,
    values: Mapping[str, Any],
    ranks: Ranks,
    later_steps: int = 0,
    evaluated: Sequence[int] = (),
) -> "RunLog | NoLog":
    """Return the log of a run on rank 0, and on all other ranks a `NoLog`, which writes nothing.

    later_steps: the number of steps of the runs that follow this run; the time left includes them.
    evaluated: the numbers of steps after which there is an evaluation, in ascending order; the time left includes it.

    All processes must call this. Raises ValueError on all processes if the log or a tracker cannot be opened.
    """
    watchdog.enter("opening the log and the trackers", timed=False)  # a server may be slow
    log: RunLog | NoLog = NoLog()
    with ranks.all_raise(ValueError):
        if ranks.is_first:
            try:
                log = RunLog(folder, progress, steps, values["track"], values, later_steps, evaluated)
            except OSError as error:
                raise ValueError(str(error)) from error
    return log


class NoLog(nullcontext[Any]):
    """Replaces the log on all ranks except rank 0, and writes nothing."""

    position = (0, "")

    def seconds(self) -> float:
        return 0.0

    def __enter__(self) -> Self:
        return self

    def train(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        pass

    evaluation = train

    def evaluating(self, step: int) -> AbstractContextManager[None]:
        return nullcontext()

    def print_line(self, line: str) -> None:
        pass


class RunLog(AbstractContextManager["RunLog"]):
    """Writes the metrics of every step. The log is a context manager that closes its files.

    values: the configuration by dotted keys, for the trackers.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        steps: int,
        track: Sequence[str],
        values: Mapping[str, Any] | None = None,
        later_steps: int = 0,
        evaluated: Sequence[int] = (),
    ):
        self._path = folder.metrics
        # open the trackers first, because the lines of the log that are removed below show which steps they have
        self._trackers = open_trackers(folder, track, progress, values or {}, self.print_line)
        with explained_write_errors(self._path):
            # unbuffered, so that closing the file does not repeat a failed write
            file = self._path.open("r+b" if progress.log_bytes else "w+b", buffering=0)
            beginning = file.read(progress.log_bytes)
            file.truncate(progress.log_bytes)
        self._file, self._digest = file, hashlib.sha256(beginning)
        self._seconds_before, self._started = progress.seconds, time.monotonic()
        self._first, self._steps, self._later_steps = progress.step, steps, later_steps
        # seconds of the last evaluation, and of all evaluations since the first step
        self._evaluated, self._evaluation, self._evaluations = evaluated, 0.0, 0.0
        self._bar = tqdm(
            total=steps,
            initial=progress.step,
            # no progress bar, so that a narrow terminal has room for the metrics
            bar_format="step {n_fmt}/{total_fmt} [{elapsed}]{postfix}",
            dynamic_ncols=True,
            disable=None,
            file=sys.stderr,
        )
        self._printed = -math.inf
        self._compiled = self._started

    def seconds(self) -> float:
        """Wall time of the run so far, including the time before it was resumed."""
        return self._seconds_before + time.monotonic() - self._started

    @property
    def position(self) -> tuple[int, str]:
        """The length and the sha256 of metrics.jsonl, after flushing it to disk."""
        os.fsync(self._file.fileno())
        return self._file.tell(), self._digest.hexdigest()

    def train(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        self._write(step, tokens, metrics)
        if step == self._first + 1:
            self._compiled = time.monotonic()
        losses = {key.removeprefix("loss/"): value for key, value in metrics.items() if key.startswith("loss/")}
        if len(set(losses.values())) == 1 < len(losses):  # the total is that of the only term
            del losses["total_nats_per_token"]
        parts = [f"{name.removesuffix('_nats_per_token')} {value:.4f}" for name, value in losses.items()]
        shown = (metric for metric in metric_table() if metric.figure and metric.key in metrics)
        parts += [metric.figure.format(metrics[metric.key]) for metric in shown]
        line = ", ".join([f"{metrics['speed/tokens_per_second']:,.0f} tokens/s", *parts, self._time_left(step)])
        with surviving_lost_reader():
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(line, refresh=False)
        now = time.monotonic()
        if self._bar.disable and (now - self._printed >= _PLAIN_EVERY or step == self._steps):
            self._printed = now
            self.print_line(f"step {step}/{self._steps}: {line}")

    def _time_left(self, step: int) -> str:
        """The time that the remaining steps and evaluations will take, in words."""
        remaining, words = (
            self._steps - step + self._later_steps,
            "left for all runs" if self._later_steps else "left",
        )
        done = step - self._first - 1  # the first step does not count, because it compiles functions
        if done <= 0 and remaining:
            return f"? {words}"
        seconds = (time.monotonic() - self._compiled - self._evaluations) / max(1, done) * remaining
        seconds += self._evaluation * (len(self._evaluated) - bisect_left(self._evaluated, step))
        return f"{tqdm.format_interval(seconds)} {words}"

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Print the name of an evaluation that takes long, and measure its time for the time that is left."""
        started = time.monotonic()
        phase = f"the evaluation after step {step}" if step else "the evaluation before the first step"
        with named_if_slow(phase, self.print_line):
            yield
        self._evaluation = time.monotonic() - started
        if step > self._first:
            self._evaluations += self._evaluation

    def evaluation(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        self._write(step, tokens, metrics)
        figures = ", ".join(
            f"{key.removeprefix('eval/').replace('_', ' ')} {value:.4f}"
            for key, value in metrics.items()
            if key not in ("eval/tokens", WITHOUT_BEST) and LENGTH not in key
        )
        self.print_line(f"step {step}: held-out {figures}")

    def print_line(self, line: str) -> None:
        """Print a line above the live line."""
        line = escaped(line, lines=True)
        with surviving_lost_reader():
            if self._bar.disable:
                print(line, flush=True)
            else:
                self._bar.write(line)

    def _write(self, step: int, tokens: int, metrics: dict[str, float]) -> None:
        values = {"tokens": tokens, "seconds": round(self.seconds(), 3), **metrics}
        line = (json.dumps({"step": step, **without_infinity(values)}, allow_nan=False) + "\n").encode()
        append(self._path, self._file, line)
        self._digest.update(line)
        self._trackers.log(step, metrics)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        self._file.close()
        self._trackers.close(complete=kind is None)
