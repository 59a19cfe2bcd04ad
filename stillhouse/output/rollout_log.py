"""Two files in the folder of an on-policy run: the timeline, and a few completions per step. Rank 0 writes them.

timeline.jsonl has one line per span of work, samples.jsonl one line per completion. Every line has the number of its
optimizer step. Lines are in the order of writing, so a line of a later step can precede a line of an earlier step. A
run that resumes from a checkpoint removes all lines of later steps, because it repeats these steps.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import TracebackType

from stillhouse.output.folder import RunFolder
from stillhouse.output.json_lines import LineFile
from stillhouse.output.records import CHARACTERS, WAIT, Lane, SampleRecord, TimelineSpan

TOKENS = 512  # the maximum number of tokens of a sample
OTHER = "other work"  # the name of the trainer's spans for the time between all other spans
SHORTEST_GAP = 1e-4  # seconds; the precision of timeline.jsonl


class RolloutLog(AbstractContextManager["RolloutLog"]):
    """Collects the spans of work and writes timeline.jsonl and samples.jsonl. As a context manager, closes the files.

    Several threads can add spans. The clock is the host's, so the time of a GPU's work belongs to the span
    that waits for the GPU.

    folder: the run's folder. If it is None (on all ranks except rank 0), nothing is written.
    step: the step of the checkpoint from which the run resumes, or 0.
    seconds: a function that returns the seconds of the run so far.
    """

    def __init__(self, folder: RunFolder | None = None, step: int = 0, seconds: Callable[[], float] = time.monotonic):
        self._files = () if folder is None else (LineFile(folder.timeline, step), LineFile(folder.samples, step))
        self._seconds = seconds
        self._lock = threading.Lock()
        self._unwritten: list[TimelineSpan] = []
        self._step, self._began = 0, 0.0
        self._trainer: list[tuple[str, float, float]] = []  # the trainer's spans of the current step

    def add(self, step: int, lane: Lane, what: str, start: float, stop: float) -> None:
        """Add a span in seconds of the run. step: the optimizer step to which the work belongs."""
        with self._lock:
            if self._files:
                self._unwritten.append(TimelineSpan(step, lane, what, round(start, 4), round(stop, 4)))

    def add_monotonic(self, step: int, lane: Lane, what: str, start: float, stop: float) -> None:
        """Like `add`, but with the times of `time.monotonic`."""
        offset = self._seconds() - time.monotonic()
        self.add(step, lane, what, offset + start, offset + stop)

    def begin_step(self, step: int) -> None:
        """Begin a step of the trainer: its spans until `end_step` belong to this step."""
        self._step, self._began, self._trainer = step, self._seconds(), []

    @contextmanager
    def trainer(self, what: str, step: int = 0, lane: Lane = "trainer", work: str = "") -> Iterator[None]:
        """Add the time of the block to the trainer's current step, even if the work is for a later step. Only the
        thread that trains may call this, and no block may be inside another one.

        lane: another lane that also gets the span, for the optimizer step `step`. work: the name of the span in that
        lane; if it is "", the name is `what`.
        """
        start = self._seconds()
        yield
        stop = self._seconds()
        self._trainer.append((what, start, stop))
        self.add(self._step, "trainer", what, start, stop)
        if lane != "trainer":
            self.add(step, lane, work or what, start, stop)

    def end_step(self) -> tuple[float, float]:
        """End the trainer's step. Return its seconds, and the seconds of its spans whose `what` begins with "wait".

        The time between the spans becomes spans called `OTHER`, so that the spans of a step add up to its seconds.
        """
        stop, until = self._seconds(), self._began
        waited = sum(end - start for what, start, end in self._trainer if what.startswith(WAIT))
        for _, start, end in [*self._trainer, ("", stop, stop)]:
            if start - until > SHORTEST_GAP:
                self.add(self._step, "trainer", OTHER, until, start)
            until = end
        return stop - self._began, waited

    def write(self, samples: Sequence[SampleRecord] = ()) -> None:
        """Write the spans that have been added so far, and the samples.

        The samples are shortened. Numbers that are not finite become None, because JSON cannot represent them.
        """
        if not self._files:
            return
        timeline_file, samples_file = self._files
        with self._lock:
            spans, self._unwritten = self._unwritten, []
        if spans:
            timeline_file.append(spans)
        bounded = [
            replace(
                sample,
                prompt=sample.prompt[-CHARACTERS:],
                completion=sample.completion[:CHARACTERS],
                tokens=[replace(token, divergence=_finite(token.divergence)) for token in sample.tokens[:TOKENS]],
                reward=_finite(sample.reward),
                reward_parts={name: _finite(value) for name, value in sample.reward_parts.items()},
                advantage=_finite(sample.advantage),
            )
            for sample in samples
        ]
        if bounded:
            samples_file.append(bounded)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files. If an error ended the run, the remaining spans are not written, so that a disk error does
        not hide the error of the run.
        """
        try:
            if kind is None:
                self.write()
        finally:
            for file in self._files:
                file.close()


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 5)
