"""Two files in the folder of an on-policy run: the timeline, and a few completions per step. Rank 0 writes them.

timeline.jsonl has one line per span of work, samples.jsonl one line per completion. Every line has the number of its
optimizer step. Lines are in the order of writing, so a line of a later step can precede a line of an earlier step. A
run that resumes from a checkpoint removes all lines of later steps, because it repeats these steps.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Protocol, Self

from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import LineFile
from stillhouse.output.records import CHARACTERS, WAIT, Lane, SampleRecord, TimelineSpan

TOKENS = 512  # the maximum number of tokens of a sample
OTHER = "other work"  # the trainer's spans between those that have a name
SHORTEST_GAP = 1e-4  # seconds; the precision of timeline.jsonl


class Clock(Protocol):
    """Has the seconds of the run."""

    @property
    def seconds(self) -> float: ...


class MonotonicClock:
    """The seconds of `time.monotonic`."""

    @property
    def seconds(self) -> float:
        return time.monotonic()


class RolloutLog:
    """Writes timeline.jsonl and samples.jsonl; a context manager that closes them.

    folder: the run's folder. None (on all ranks except rank 0): nothing is written.
    step: the step of the checkpoint from which the run resumes, or 0.
    """

    def __init__(self, folder: RunFolder | None, step: int, clock: Clock):
        self._samples = None if folder is None else LineFile(folder.samples, step)
        self.timeline = WorkTimeline(clock, None if folder is None else LineFile(folder.timeline, step))

    def write(self, samples: Sequence[SampleRecord] = ()) -> None:
        """Write the spans that have been added so far, and the samples, shortened."""
        self.timeline.write()
        if self._samples is not None and samples:
            self._samples.append([_bounded(sample) for sample in samples])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files. If an error ended the run, the remaining spans are not written, so that an error of the
        disk does not hide this error."""
        try:
            if kind is None:
                self.timeline.write()
        finally:
            self.timeline.close()
            if self._samples is not None:
                self._samples.close()


class WorkTimeline:
    """Collects the spans of work, in seconds of the run; may be used from several threads.

    The clock is the host's, so the time of a GPU's work belongs to the span that waits for the GPU.
    """

    def __init__(self, clock: Clock, file: LineFile | None = None):
        self._clock, self._file = clock, file
        self._lock = threading.Lock()
        self._unwritten: list[TimelineSpan] = []
        self._step, self._began = 0, 0.0
        self._trainer: list[tuple[str, float, float]] = []  # the trainer's spans of the current step

    @property
    def seconds(self) -> float:
        return self._clock.seconds

    def add(self, step: int, lane: Lane, what: str, start: float, stop: float) -> None:
        """Add a span in seconds of the run. step: the optimizer step to which the work belongs."""
        with self._lock:
            if self._file is not None:
                self._unwritten.append(TimelineSpan(step, lane, what, round(start, 4), round(stop, 4)))

    def add_monotonic(self, step: int, lane: Lane, what: str, start: float, stop: float) -> None:
        """As `add`, in seconds of `time.monotonic`."""
        offset = self.seconds - time.monotonic()
        self.add(step, lane, what, offset + start, offset + stop)

    def begin_step(self, step: int) -> None:
        """Begin a step of the trainer: its spans until `end_step` belong to this step."""
        self._step, self._began, self._trainer = step, self.seconds, []

    @contextmanager
    def trainer(self, what: str, step: int = 0, lane: Lane = "trainer", work: str = "") -> Iterator[None]:
        """Add the time of the block to the trainer's current step, also if the work is for a later step. Only the
        thread that trains may call this, and no block may be inside another one.

        lane: add it to this lane, too, as `work` for the optimizer step `step`. work: "" for `what`.
        """
        start = self.seconds
        yield
        stop = self.seconds
        self._trainer.append((what, start, stop))
        self.add(self._step, "trainer", what, start, stop)
        if lane != "trainer":
            self.add(step, lane, work or what, start, stop)

    def end_step(self) -> tuple[float, float]:
        """End the trainer's step; return its seconds, and how many of them the trainer waited.

        The trainer's other seconds become spans called `OTHER`, so that the spans of a step add up to its seconds.
        It waited in the spans whose `what` begins with "wait".
        """
        stop, until = self.seconds, self._began
        waited = sum(end - start for what, start, end in self._trainer if what.startswith(WAIT))
        for _, start, end in [*self._trainer, ("", stop, stop)]:
            if start - until > SHORTEST_GAP:
                self.add(self._step, "trainer", OTHER, until, start)
            until = end
        return stop - self._began, waited

    def write(self) -> None:
        with self._lock:
            records, self._unwritten = self._unwritten, []
        if self._file is not None and records:
            self._file.append(records)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _bounded(sample: SampleRecord) -> SampleRecord:
    """Shorten a sample for the file. Numbers that are not finite become None, because JSON cannot represent them."""
    return replace(
        sample,
        prompt=sample.prompt[-CHARACTERS:],
        completion=sample.completion[:CHARACTERS],
        tokens=[replace(token, divergence=_finite(token.divergence)) for token in sample.tokens[:TOKENS]],
        reward=_finite(sample.reward),
        reward_parts={name: _finite(value) for name, value in sample.reward_parts.items()},
        advantage=_finite(sample.advantage),
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 5)
