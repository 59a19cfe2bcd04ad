"""The main thread of a server. It takes batches from the queue and runs the model until the server ends."""

import gc
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus

import torch

from stillhouse.display import first_line
from stillhouse.models import NotFiniteError
from stillhouse.preemption import requested
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.http_thread import LAST_SECONDS, HttpThread
from stillhouse.serving.server.request_errors import RequestError
from stillhouse.serving.server.request_queue import Item

#: the most seconds between two checks whether the server has to end, while no request arrives
LOOK_SECONDS = 0.1
#: the server ends after so many failed batches in a row. Batches that failed for lack of memory do not count
MAX_FAILURES = 3
#: seconds after which a thread must release the interpreter to another thread. The model's thread rarely releases it
#: earlier, so that Python's default of 5 ms would delay each request several times
SWITCH_SECONDS = 0.0005


def is_ending(stop: threading.Event | None) -> bool:
    """Whether the process has received a signal to end (such as SIGTERM), or `stop` is set."""
    return bool(requested()) or (stop is not None and stop.is_set())


class ModelLoop:
    def __init__(self, application: Application, server: HttpThread):
        self._role, self._queue, self._metrics = application.role, application.queue, application.metrics
        self._server = server
        self._failures = 0

    def run(self) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        queue = self._queue
        try:
            while True:
                is_last = queue.is_draining
                if is_last:
                    queue.drain()  # no request enters the queue after this line, so that an empty queue stays empty
                if not self._server.is_alive:
                    raise RuntimeError("the HTTP thread has ended")
                self._role.between_batches()
                if batch := queue.next_batch(LOOK_SECONDS):
                    self._compute(batch)
                elif is_last:
                    break
            self._role.end()
            queue.wait_until_answered(LAST_SECONDS)
        finally:
            queue.drain()
            queue.fail_all(_failure("the server ends because of an error"))
            self._server.end()

    def _compute(self, batch: Sequence[Item]) -> None:
        parts = [ticket.parts[number] for ticket, number in batch]
        tokens, started = sum(part.tokens for part in parts), time.monotonic()
        try:
            outcomes = self._role.compute(parts)
        except (RuntimeError, ValueError) as error:
            # Only the requests of this batch fail. After several failed batches in a row the server ends, because
            # the GPU may be lost. With several ranks the server ends at once, because other ranks may still be in the
            # forward pass that has failed here.
            self._metrics.failed_batch()
            is_memory = isinstance(error, torch.OutOfMemoryError) or "memory" in str(error)
            problem = (
                "too little memory for a batch: send less at a time" if is_memory else "the forward pass has failed"
            )
            for ticket, _ in batch:
                ticket.fail(_failure(problem))
            print(f"a batch of {tokens:,} tokens failed: {first_line(error)}", file=sys.stderr, flush=True)
            self._failures += not is_memory
            if not self._role.survives_failures or self._failures >= MAX_FAILURES:
                raise
            _free_memory()
            return
        self._failures = 0
        seconds = time.monotonic() - started
        self._queue.record_speed(tokens, seconds)
        self._metrics.batch(tokens, seconds)
        for (ticket, number), outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, NotFiniteError):
                ticket.fail(RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(outcome)))
            else:
                ticket.finish(number, outcome)


def _failure(problem: str) -> RequestError:
    return RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, problem)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
