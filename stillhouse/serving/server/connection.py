"""The connections of a server: uvicorn's HTTP/1.1, with limits, so that idle clients do not block others.

A connection waits until it has received the complete header of a request, for at most `HEADER_SECONDS`. If there are
too many connections, the server closes the one that has waited longest. `Room` limits how many connections have a
request at a time, so that the server always accepts a new connection and always answers `/healthz`.
"""

import asyncio
import resource
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stillhouse.serving.server.bodies import RequestError

#: routes that need no bearer token and are never refused by `Room`, for the probes of an orchestrator
OPEN_PATHS = ("/healthz",)
#: seconds that a connection waits for the header of a request, or for more of a body that was answered early
HEADER_SECONDS = 10.0
#: limits for the rest of a body that was answered early
LATE_BYTES, LATE_SECONDS = 2**30, 120.0
#: the most connections at a time, and how many of them must have no request
CONNECTIONS, SPARE = 2048, 64
#: headers of requests with a body
_LENGTH_HEADERS = (b"content-length", b"transfer-encoding")


def most_connections() -> int:
    """The most connections at a time. Each connection needs a file descriptor; the model's libraries need others."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_bounded = descriptors != resource.RLIM_INFINITY
    return max(2 * SPARE, min(CONNECTIONS, descriptors // 2)) if is_bounded else CONNECTIONS


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self.waits_since = 0.0

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
        self.waits_since = time.monotonic()
        self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()  # sends the rest of the last answer first; `abort` ends it if the client does not read
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _end_to_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Drained:
    """Reads the rest of a body that was answered early, such as one that is too large, and keeps nothing of it.

    The client gets the whole answer before. Without this, a client that sends all of its body before it reads would
    get a reset in place of the answer. Beyond `LATE_BYTES` or `LATE_SECONDS`, and `HEADER_SECONDS` after the last
    byte, the answer is ended all the same.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lengths = {value for name, value in scope.get("headers", ()) if name in _LENGTH_HEADERS}
        is_read, is_held = lengths <= {b"0"}, False

        async def reading() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)  # no message of a closed connection has it
            return message

        async def sending(message: Message) -> None:
            nonlocal is_held
            if message["type"] == "http.response.body" and not message.get("more_body", False) and not is_read:
                is_held, message = True, {**message, "more_body": True}
            await send(message)

        await self._app(scope, reading, sending)
        if is_held:
            left = LATE_BYTES
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_SECONDS):
                    while not is_read and left > 0:
                        async with asyncio.timeout(HEADER_SECONDS):
                            left -= len((await reading()).get("body", b""))
            await send({"type": "http.response.body", "body": b""})


class Room:
    """Answers 503 if fewer than `SPARE` connections would remain without a request. Always admits `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp):
        self._app, self._requests, self._refused = app, 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._requests >= most_connections() - SPARE and scope.get("path") not in OPEN_PATHS:
            headers = {"Retry-After": "1", "Connection": "close"}
            error = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at a time", headers=headers)
            # the spare connections must not all be those of clients that send bodies slowly
            refusal = Drained(error.response()) if self._refused < SPARE // 2 else error.response()
            self._refused += 1
            try:
                await refusal(scope, receive, send)
            finally:
                self._refused -= 1
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1
