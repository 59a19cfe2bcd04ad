"""The connections of a server: uvicorn's HTTP/1.1, with limits, so that idle clients do not block others.

A connection waits until it has received the complete header of a request, for at most `HEADER_SECONDS`. If there are
too many connections, the server closes the one that has waited longest. `Room` limits how many connections have a
request at a time, so that the server always accepts a new connection and always answers `/healthz`.
"""

import asyncio
import resource
import time
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stillhouse.serving.server.request_errors import RequestError

#: routes that need no bearer token and are never refused by `Room`, for the probes of an orchestrator
OPEN_PATHS = ("/healthz",)
#: seconds that a connection waits for the header of a request, or for more of a body after the answer was sent
HEADER_SECONDS = 10.0
#: limits for a body that still arrives after the answer was sent: a client that sends its full body before it reads
#: must get the answer, too
LATE_BYTES, LATE_SECONDS = 128 * 2**20, 120.0
#: the most connections at a time, and how many of them must have no request
CONNECTIONS, SPARE = 2048, 64


def most_connections() -> int:
    """The most connections at a time. Each connection needs a file descriptor; the model's libraries need others."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = descriptors != resource.RLIM_INFINITY
    return max(2 * SPARE, min(CONNECTIONS, descriptors // 2)) if is_bounded else CONNECTIONS


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self.waits_since, self._late_bytes, self._late_bytes_before = 0.0, 0, 0

    @property
    def waits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn does
        super().connection_made(transport)
        self._begin_to_wait()
        excess = len(self.connections) - most_connections()
        if excess > 0:
            others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
            waiting = [other for other in others if other.waits and not other.transport.is_closing()]
            if waiting:
                min(waiting, key=lambda other: other.waits_since).transport.abort()
            elif excess > SPARE:  # the spare connections may have requests that `Room` is about to refuse
                self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.waits:
            self._late_bytes += len(data)
            if self._late_bytes > LATE_BYTES:
                self.transport.abort()
                return
        super().data_received(data)
        if not self.waits:
            self._end_to_wait()

    def on_response_complete(self) -> None:
        self._begin_to_wait()
        super().on_response_complete()  # uvicorn may begin with the next request here
        if not self.waits:
            self._end_to_wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_to_wait()
        super().connection_lost(exc)

    def _begin_to_wait(self) -> None:
        self._end_to_wait()
        self.waits_since, self._late_bytes, self._late_bytes_before = time.monotonic(), 0, 0
        self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        sends_body = self.conn.their_state is h11.SEND_BODY and self._late_bytes > self._late_bytes_before
        if sends_body and time.monotonic() - self.waits_since < LATE_SECONDS:
            self._late_bytes_before = self._late_bytes
            self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)
            return
        self.transport.close()  # sends the rest of the last answer first; `abort` ends it if the client does not read
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_to_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Room:
    """Answers 503 if fewer than `SPARE` connections would remain without a request. Always admits `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp):
        self._app, self._requests = app, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._requests >= most_connections() - SPARE and scope.get("path") not in OPEN_PATHS:
            headers = {"Retry-After": "1", "Connection": "close"}
            error = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at a time", headers=headers)
            await error.response()(scope, receive, send)
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1
