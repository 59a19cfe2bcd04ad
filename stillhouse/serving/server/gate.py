"""What every route shares: the bearer token or the server's names, limits of request bodies, and clients that
disconnect or do not read.

The middleware is plain ASGI, so that it refuses a request without the token before it reads any of the body.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillhouse.serving.server.bodies import RequestError, busy
from stillhouse.serving.server.connection import OPEN_PATHS

#: seconds that a client has for sending a body, and for reading each piece of an answer
BODY_SECONDS, SEND_SECONDS = 120.0, 120.0
_PIECE = 2**20


class BearerToken:
    """Answers 401 to every request without the token, except on `OPEN_PATHS`."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            tokens = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._expected):
                error = RequestError(
                    HTTPStatus.UNAUTHORIZED,
                    "expected the header `Authorization: Bearer` with this server's token",
                    headers={"WWW-Authenticate": "Bearer"} | _unread(scope),
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class LocalNames:
    """For a server without a token on loopback: refuses requests to other names, and those of other sites' pages.

    A browser on this machine reaches the server, too. A page of another site could make it do so, by a form, or by a
    name of its own that it lets point to 127.0.0.1 (DNS rebinding), by which it could read the answers.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and (error := _host_error(scope)) is not None:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _host_error(scope: Scope) -> RequestError | None:
    instead = "start it with a token (STILLHOUSE_TOKEN) for clients that use another name"
    for name, value in scope["headers"]:
        if name == b"host" and not is_loopback(_host(b"//" + value)):
            return RequestError(
                HTTPStatus.MISDIRECTED_REQUEST,
                "this server has no token and serves this machine alone: expected localhost or 127.0.0.1 as its host "
                "(the header `Host`); " + instead,
                headers=_unread(scope),
            )
        if name == b"origin" and not is_loopback(_host(value)):
            return RequestError(
                HTTPStatus.FORBIDDEN,
                f"a request of another site's page (the header `Origin`), and this server has no token; {instead}",
                headers=_unread(scope),
            )
    return None


def _host(url: bytes) -> str:
    """The host of a URL; "" if it has none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name other than localhost


class _UnreadError(Exception):
    """The client does not read its answer."""


class AnsweredByProtocol:
    """The outermost layer, which drops answers that cannot be sent. uvicorn itself answers invalid HTTP; if a route
    has begun to answer before, the route's answer fails. The connection of a client that does not read is closed.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError as error:
                raise _UnreadError from error

        try:
            await self._app(scope, receive, in_time)
        except (h11.LocalProtocolError, _UnreadError):
            return  # uvicorn closes a connection whose answer is not complete


class Counted:
    """Calls `count(path, status, seconds)` after each answer."""

    def __init__(self, app: ASGIApp, count: Callable[[str, int, float], None]):
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, statuses = asyncio.get_running_loop().time(), [int(HTTPStatus.INTERNAL_SERVER_ERROR)]

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses[0] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._count(scope["path"], statuses[0], asyncio.get_running_loop().time() - started)


class Bodies:
    """Reads request bodies. Each body has its own limit; all bodies in memory have at most `total` bytes together."""

    def __init__(self, total: int):
        self._total, self._held = total, 0

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Yield a request's body. It counts towards `total` until the context ends.

        Raises RequestError if the body is too large, is sent too slowly, or would exceed `total`.
        """
        content = bytearray()
        try:
            await self._receive(request, limit, content)
            yield bytes(content)
        finally:
            self._held -= len(content)

    async def _receive(self, request: Request, limit: int, content: bytearray) -> None:
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit, request.scope)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    if len(content) + len(chunk) > limit:
                        raise _too_large(limit, request.scope)
                    if self._held + len(chunk) > self._total:
                        raise busy("too many bodies are being read: try again", headers=_unread(request.scope))
                    self._held += len(chunk)
                    content += chunk
        except TimeoutError as error:
            raise RequestError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not arrive within {BODY_SECONDS:g} s",
                headers={"Connection": "close"},
            ) from error


class Answer(Response):
    """A response that calls `sent` after it was sent, or after sending has failed."""

    def __init__(self, content: bytes, media_type: str, sent: Callable[[], None]):
        super().__init__(None, media_type=media_type)
        self.headers["Content-Length"] = str(len(content))
        self._content, self._sent = content, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            view = memoryview(self._content)
            for start in range(0, len(view), _PIECE):
                piece = bytes(view[start : start + _PIECE])
                more = start + _PIECE < len(view)
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self._sent()


async def until_disconnected(request: Request) -> None:
    """Return when the client has closed its connection. The caller must have read the request's body before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _too_large(limit: int, scope: Scope) -> RequestError:
    return RequestError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is too large: expected at most {limit:,} bytes of this content type",
        headers=_unread(scope),
    )


def _unread(scope: Scope) -> dict[str, str]:
    """Headers of an answer that is sent before the request's body was read. The rest of the body is discarded (see
    `Drained`); a client that waits for `100 Continue` will not send it, so that its connection is closed.
    """
    return {"Connection": "close"} if any(name == b"expect" for name, _ in scope["headers"]) else {}
