"""The address, the HTTP thread and the connections of a server: uvicorn's HTTP/1.1, with limits against idle clients.

A connection waits for at most `HEADER_SECONDS` until it has received the complete header of a request. If there are
too many connections, the server closes the connection that has waited longest. `Room` limits the number of
connections with a request, so that the server always accepts a new connection and always answers `/healthz`.
"""

import asyncio
import resource
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stillhouse.serving.server.gate import OPEN_PATHS, RequestError

#: the maximum number of seconds that a connection waits for the complete header of a request, or for more data of a
#: body whose request has already been answered
HEADER_SECONDS = 10.0
#: the limits for reading the rest of a body whose request has already been answered
LATE_BYTES, LATE_SECONDS = 2**30, 120.0
#: the maximum number of connections at a time, and how many of them must remain without an accepted request
CONNECTIONS, SPARE = 2048, 64
#: the maximum number of seconds that a client may take to read each piece of an answer
SEND_SECONDS = 120.0
#: the maximum number of seconds for sending the last answers when the server ends
LAST_SECONDS = 60.0
#: the maximum number of connections that the operating system queues until the server accepts them
BACKLOG = 2048


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address. Raises OSError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on a socket with IPPROTO_TCP; without TCP_NODELAY, answers wait 40 ms for an ACK
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise OSError(f"host {host}, port {port} cannot be used: {error}") from error
    return listening


class HttpThread:
    """Runs uvicorn in a separate thread, where uvicorn installs no signal handlers. The main thread calls `end`.

    Every request gets the status 503 until `serve` is called, so that clients know that the server loads its model.

    Raises OSError if another process already listens on the address. Binding alone would not detect that process.
    """

    def __init__(self, bound_socket: socket.socket):
        self.address, self._room = bound_socket.getsockname()[:2], Room()
        try:
            bound_socket.listen(BACKLOG)
        except OSError as error:
            host, port = self.address
            raise OSError(f"host {host}, port {port} cannot be used: {error}") from error
        config = uvicorn.Config(
            self._room,
            http=Connection,
            log_config=None,  # uvicorn's own would close all handlers of the process
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(LAST_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._server.run, args=([bound_socket],), name="http", daemon=True)
        self.thread.start()
        while not self._server.started and self.thread.is_alive():
            time.sleep(0.01)

    def serve(self, app: ASGIApp) -> None:
        """Let an application answer all later requests."""
        self._room.app = drained(app)

    def end(self) -> None:
        self._server.should_exit = True
        self.thread.join(2 * LAST_SECONDS)


def most_connections() -> int:
    """Return the maximum number of connections at a time. Each connection needs a file descriptor, and at most half
    of the process's descriptors are for connections, because the model's libraries need the others.
    """
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
            elif excess > SPARE:  # a smaller excess is allowed, because requests that `Room` refuses end soon
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
        def give_up() -> None:
            self.transport.close()  # sends the rest of the last answer first, until the `abort` below ends this
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

        self._end_to_wait()
        self.waits_since = time.monotonic()
        self._timer = self.loop.call_later(HEADER_SECONDS, give_up)

    def _end_to_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def drained(app: ASGIApp) -> ASGIApp:
    """Wrap an application: after an answer that was sent before the whole body was read, for example because the body
    is too large, read and discard the rest of the body.

    Without this, a client that sends its whole body before it reads would get a connection reset instead of the
    answer. Reading stops after `LATE_BYTES`, after `LATE_SECONDS`, or if nothing arrives for `HEADER_SECONDS`.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        lengths = {value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        is_read, is_held = lengths <= {b"0"}, False

        async def reading() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = not message.get("more_body", False)  # the message of a closed connection lacks this key
            return message

        async def sending(message: Message) -> None:
            nonlocal is_held
            if message["type"] == "http.response.body" and not message.get("more_body", False) and not is_read:
                is_held, message = True, {**message, "more_body": True}
            await send(message)

        await app(scope, reading, sending)
        if is_held:
            left = LATE_BYTES
            with suppress(TimeoutError):
                async with asyncio.timeout(LATE_SECONDS):
                    while not is_read and left > 0:
                        async with asyncio.timeout(HEADER_SECONDS):
                            left -= len((await reading()).get("body", b""))
            await send({"type": "http.response.body", "body": b""})

    return answer


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    error = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the model is being loaded", headers={"Retry-After": "1"})
    await error.response()(scope, receive, send)


class _UnreadError(Exception):
    """The client does not read its answer."""


class Room:
    """The outermost layer of the application. It answers 503 if fewer than `SPARE` connections would remain without a
    request, except on `OPEN_PATHS`. It drops answers that cannot be sent.

    An answer cannot be sent if uvicorn has answered invalid HTTP on the same connection while a route was answering,
    or if the client does not read. The connection of a client that does not read is closed.
    """

    def __init__(self) -> None:
        self.app = drained(_loading)
        #: the current number of requests that are accepted (False) and that are being refused (True)
        self._requests = {False: 0, True: 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError as error:
                raise _UnreadError from error

        has_room = self._requests[False] < most_connections() - SPARE or scope["path"] in OPEN_PATHS
        answer, is_refused = self.app, not has_room
        if is_refused:
            headers = {"Retry-After": "1", "Connection": "close"}
            error = RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "too many requests at a time", headers=headers)
            # the rest of a body is read on at most half of the spare connections, because clients may send slowly
            answer = drained(error.response()) if self._requests[True] < SPARE // 2 else error.response()
        self._requests[is_refused] += 1
        try:
            with suppress(h11.LocalProtocolError, _UnreadError):  # uvicorn closes a connection after a partial answer
                await answer(scope, receive, in_time)
        finally:
            self._requests[is_refused] -= 1
