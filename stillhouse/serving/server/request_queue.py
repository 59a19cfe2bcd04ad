"""The queue between the HTTP server and the model: bounded, and divided into batches by a token budget.

A request is one or more parts: documents to score, or a completion to write. The model's thread takes parts from the
front of the queue until the budget of a batch is filled, so the parts of a large request may be in several batches
and those of small requests share one. Tokens count against the queue's limit from the moment a request is accepted
until its answer has been sent, so that answers which clients read slowly are bounded, too.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol

from stillhouse.serving.server.request_errors import ENDING, RequestError, busy


class Part(Protocol):
    """A part of a request that the model computes in one batch. tokens: how much of the batch it fills."""

    @property
    def tokens(self) -> int: ...


class Ticket:
    """An accepted request. results: the model's result for each part, when all are computed."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.tokens = sum(part.tokens for part in parts)
        self.results: Future[list[Any]] = Future()
        self._by_number: dict[int, Any] = {}
        self.is_released = False

    def finish(self, number: int, result: Any) -> None:
        """Record the model's result for one part."""
        self._by_number[number] = result
        if len(self._by_number) == len(self.parts):
            with suppress(
                InvalidStateError
            ):  # it has failed, or the client has left and its handler has cancelled it
                self.results.set_result([self._by_number[at] for at in range(len(self.parts))])

    def fail(self, error: RequestError) -> None:
        """The error is the answer, unless the request has failed before."""
        with suppress(InvalidStateError):
            self.results.set_exception(error)


#: a part of a request, by its number there
Item = tuple[Ticket, int]


class RequestQueue:
    """Requests that wait for the model. All methods may be called from any thread.

    batch_tokens: the most tokens of a batch; a document that has more is a batch of its own. queue_tokens: the most
    tokens of all requests that are accepted and not answered completely. ends: whether the server is to end; it is
    asked for each request, because the model's thread, which calls `drain`, may be in a batch for minutes.
    """

    def __init__(self, batch_tokens: int, queue_tokens: int, ends: Callable[[], object] = lambda: False):
        self.batch_tokens, self.queue_tokens, self.ends = batch_tokens, queue_tokens, ends
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._held = 0
        self._closed = False
        self._tokens_per_second = 0.0

    @property
    def held_tokens(self) -> int:
        """Tokens of requests that are accepted and not answered completely."""
        return self._held

    @property
    def waiting(self) -> int:
        """Documents that wait for the model."""
        return len(self._items)

    @property
    def is_draining(self) -> bool:
        """Whether nothing more is accepted."""
        return self._closed or bool(self.ends())

    def submit(self, parts: Sequence[Part]) -> Ticket:
        """Accept a request. The caller releases the ticket at the end.

        Raises RequestError if the queue is full, or the server ends and only answers what it has accepted.

        A request is always accepted if there is no other one, so that its size alone cannot shut it out.
        """
        ticket = Ticket(parts)
        with self._changed:
            if self.is_draining:
                raise RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{ENDING} and accepts no more requests",
                    headers={"Connection": "close"},
                )
            if self._held and self._held + ticket.tokens > self.queue_tokens:
                seconds = self._seconds_until_room(ticket.tokens)
                raise busy(f"the queue is full: try again in {seconds} s", seconds)
            self._held += ticket.tokens
            self._items.extend((ticket, number) for number in range(len(parts)))
            self._changed.notify_all()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The answer was sent, or the client left. The parts that are not computed yet are dropped."""
        with self._changed:
            ticket.results.cancel()
            if not ticket.is_released:
                ticket.is_released = True
                self._held -= ticket.tokens
                self._changed.notify_all()

    def next_batch(self, seconds: float) -> list[Item]:
        """Documents for one batch; empty if none has come after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._items, timeout=seconds)
            batch: list[Item] = []
            tokens = 0
            while self._items:
                ticket, number = self._items[0]
                if not ticket.results.done():
                    tokens += ticket.parts[number].tokens
                    if batch and tokens > self.batch_tokens:
                        break
                    batch.append((ticket, number))
                self._items.popleft()
            return batch

    def record_speed(self, tokens: int, seconds: float) -> None:
        """The speed of a batch, from which the time is estimated until there is room."""
        speed = tokens / max(seconds, 1e-6)
        self._tokens_per_second = 0.8 * self._tokens_per_second + 0.2 * speed if self._tokens_per_second else speed

    def drain(self) -> None:
        """Accept nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_until_answered(self, seconds: float) -> bool:
        """Wait until every accepted request has been answered; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout=seconds)

    def fail_all(self, error: RequestError) -> None:
        """Answer every request that still waits with an error."""
        with self._changed:
            for ticket, _ in self._items:
                ticket.fail(error)
            self._items.clear()

    def _seconds_until_room(self, tokens: int) -> int:
        too_many = self._held + tokens - self.queue_tokens
        speed = self._tokens_per_second or float(self.batch_tokens)
        return max(1, min(60, round(too_many / speed)))
