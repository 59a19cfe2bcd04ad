"""One connection of a server: uvicorn's HTTP/1.1, in which silent clients take no place from others.

A connection waits until it has the complete header of a request. It may wait for some seconds. If there are too many
connections, the one that has waited longest is closed. `Room` limits the connections with requests, so that a new
connection always finds a place, and `/healthz` is always answered.
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

#: the one route without a token and without a limit, for the probes of an orchestrator
OPEN_PATHS = ("/healthz",)
#: how long a connection may wait for the header of a request, or send what nobody reads after it was answered
HEADER_SECONDS = 10.0
#: the most bytes that a client may send after its answer, and for how long, so that a client which sends everything
#: before it reads still gets the answer
LATE_BYTES, LATE_SECONDS = 128 * 2**20, 120.0
#: connections at a time, and how many of them requests leave free
CONNECTIONS, SPARE = 2048, 64


def most_connections() -> int:
    """Connections at a time. Each needs a file descriptor, and the model's libraries need some, too."""
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
            elif excess > SPARE:  # requests that `Room` has not refused yet may take the spare ones
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
        super().on_response_complete()  # it may begin with the next request
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
        self.transport.close()  # after the rest of the last answer has been sent, if the client reads it
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_to_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Room:
    """Answers 503 if too few connections would be free for others, except to requests for `OPEN_PATHS`."""

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
