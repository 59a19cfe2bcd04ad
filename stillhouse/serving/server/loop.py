"""The main thread of a server: takes batches from the queue and runs the model until the server ends."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from stillhouse.display import first_line
from stillhouse.preemption import requested
from stillhouse.serving.server.batching import Item, ScoringFailedError
from stillhouse.serving.server.http import LAST_SECONDS, HttpThread
from stillhouse.serving.server.routes import Served

#: how often the main thread looks for a signal
LOOK_SECONDS = 0.1
#: so many batches in a row whose pass fails, for another reason than too little memory, end the server
MOST_FAILURES = 3
#: how long a thread may keep the interpreter while another one waits. Python's 5 ms would be added to each request
#: several times, because the model's thread hardly ever gives it up before
SWITCH_SECONDS = 0.0005


def is_ending(stop: threading.Event | None) -> bool:
    """Whether a signal has come, or `stop` is set."""
    return bool(requested()) or (stop is not None and stop.is_set())


class Loop:
    """Computes batches.

    compute: returns for each part of a batch what its request gets, or an error. between: called before each batch,
    and several times a second while nothing is asked. at_end: called after the last batch. survives: whether another
    batch may follow one that has failed.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Any]], Sequence[Any]],
        service: Served,
        server: HttpThread,
        *,
        between: Callable[[], None],
        at_end: Callable[[], None] | None = None,
        survives: bool = True,
    ):
        self._compute, self._service, self._server = compute, service, server
        self._between, self._at_end, self._survives = between, at_end, survives
        self._failures = 0

    def run(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        queue = self._service.queue
        try:
            while True:
                ends = queue.is_draining
                if ends:
                    queue.drain()  # a request that was accepted before this line is in the queue
                if not self._server.is_alive:
                    raise RuntimeError("the HTTP thread has ended")
                self._between()
                if batch := queue.next_batch(LOOK_SECONDS):
                    self._run(batch)
                elif ends:
                    break
            if self._at_end is not None:
                self._at_end()
            queue.wait_until_answered(LAST_SECONDS)
        finally:
            queue.drain()
            queue.fail_all(ScoringFailedError("the server ends because of an error"))
            self._server.end()

    def _run(self, batch: Sequence[Item]) -> None:
        queue, metrics = self._service.queue, self._service.metrics
        parts = [ticket.parts[number] for ticket, number in batch]
        tokens, started = sum(part.tokens for part in parts), time.monotonic()
        try:
            outcomes = self._compute(parts)
        except RuntimeError as error:
            # Too little memory, and whatever else a kernel reports for this batch alone: only its requests fail. The
            # server ends after several such batches in a row, because the GPU may be lost. Of several ranks, others
            # may still be in the pass that has failed here, so nothing can follow.
            metrics.failed_batch()
            is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
            what = (
                "too little memory for a batch: send less at a time" if is_memory else "the forward pass has failed"
            )
            for ticket, _ in batch:
                ticket.fail(ScoringFailedError(what))
            print(f"a batch of {tokens:,} tokens failed: {first_line(error)}", file=sys.stderr, flush=True)
            self._failures += not is_memory
            if not self._survives or self._failures >= MOST_FAILURES:
                raise
            _free_memory()
            return
        self._failures = 0
        seconds = time.monotonic() - started
        queue.record_speed(tokens, seconds)
        metrics.batch(tokens, seconds)
        for (ticket, number), outcome in zip(batch, outcomes, strict=True):
            ticket.finish(number, outcome)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
