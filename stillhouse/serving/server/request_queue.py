"""The queue between the HTTP thread, which adds requests, and the model's thread, which takes batches of their parts.

A request has one or more parts: documents to score, or a completion to generate. The tokens of a request count
towards the limit of the queue until the answer has been sent. So the limit also bounds the memory of answers that
wait for slow clients.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol

from stillhouse.serving.server.gate import ENDING, RequestError, busy


class Part(Protocol):
    """A part of a request. tokens: the tokens that count towards the limits of a batch and of the queue."""

    @property
    def tokens(self) -> int: ...
    @property
    def has_media(self) -> bool: ...


class Ticket:
    """An accepted request. results: a future with the model's result for each part."""

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
            with suppress(InvalidStateError):  # the request has failed, or the client has disconnected
                self.results.set_result([self._by_number[at] for at in range(len(self.parts))])

    def fail(self, error: RequestError) -> None:
        """Answer the request with the error, unless it already has an answer or an error."""
        with suppress(InvalidStateError):
            self.results.set_exception(error)


#: a part of a request: the request, and the number of the part in the request
Item = tuple[Ticket, int]


class RequestQueue:
    """Requests that wait for the model. All methods may be called from any thread.

    batch_tokens: the most tokens of a batch; a larger part is a batch by itself.
    queue_tokens: the most tokens of all requests that are accepted and not yet completely answered.
    ends: returns whether the server must end. It is called for each request, because the model's thread may compute
    for minutes before it calls `drain`.
    deterministic: whether all parts of a batch belong to one request. If not, an answer depends on the requests of
    other clients, because the rounding of a matrix product depends on its number of rows.
    """

    def __init__(self, batch_tokens: int, queue_tokens: int, ends: Callable[[], bool], *, deterministic: bool):
        self.batch_tokens, self.queue_tokens, self.ends = batch_tokens, queue_tokens, ends
        self.deterministic = deterministic
        #: the parts that wait for the model, and the tokens of requests that are not yet completely answered
        self.items, self.held = deque[Item](), 0
        self._changed = threading.Condition()
        self._closed = False
        self._tokens_per_second = 0.0

    @property
    def is_draining(self) -> bool:
        """Whether the queue accepts no more requests."""
        return self._closed or self.ends()

    def submit(self, parts: Sequence[Part]) -> Ticket:
        """Accept a request. An empty queue accepts a request of any size. The caller must later `release` the ticket.

        Raises RequestError if the queue is full, or if the server is ending.
        """
        ticket = Ticket(parts)
        with self._changed:
            if self.is_draining:
                raise RequestError(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"{ENDING} and accepts no more requests",
                    headers={"Connection": "close"},
                )
            if self.held and self.held + ticket.tokens > self.queue_tokens:
                too_many = self.held + ticket.tokens - self.queue_tokens
                speed = self._tokens_per_second or float(self.batch_tokens)
                seconds = max(1, min(60, round(too_many / speed)))
                raise busy(f"the queue is full: try again in {seconds} s", seconds)
            self.held += ticket.tokens
            self.items.extend((ticket, number) for number in range(len(parts)))
            self._changed.notify_all()
        return ticket

    def release(self, ticket: Ticket) -> None:
        """End a request after its answer was sent or its client has disconnected. Its waiting parts are dropped."""
        with self._changed:
            ticket.results.cancel()
            if not ticket.is_released:
                ticket.is_released = True
                self.held -= ticket.tokens
                self._changed.notify_all()

    def next_batch(self, seconds: float) -> list[Item]:
        """Take the parts for one batch from the queue. The list is empty if no part arrives within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.items, timeout=seconds)
            batch: list[Item] = []
            tokens = 0
            while self.items:
                ticket, number = self.items[0]
                if not ticket.results.done():
                    tokens += ticket.parts[number].tokens
                    if batch and (tokens > self.batch_tokens or (self.deterministic and ticket is not batch[0][0])):
                        break
                    batch.append((ticket, number))
                self.items.popleft()
            return batch

    def record_speed(self, tokens: int, seconds: float) -> None:
        """Record the speed of a batch. A full queue uses the speed to estimate when clients should try again."""
        speed = tokens / max(seconds, 1e-6)
        self._tokens_per_second = 0.8 * self._tokens_per_second + 0.2 * speed if self._tokens_per_second else speed

    def drain(self) -> None:
        """Accept no more requests."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_until_answered(self, seconds: float) -> bool:
        """Wait until every accepted request is answered; return False if this takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.held, timeout=seconds)

    def fail_all(self, error: RequestError) -> None:
        """Accept no more requests, and answer every request that has a waiting part with the error."""
        self.drain()
        with self._changed:
            for ticket, _ in self.items:
                ticket.fail(error)
            self.items.clear()
