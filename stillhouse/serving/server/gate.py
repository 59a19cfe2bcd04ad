"""What every route shares: the bearer token or the server's names, limits of request bodies, and clients that
disconnect or do not read.

The middleware is plain ASGI, so that it refuses a request without the token before it reads any of the body.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from urllib.parse import urlsplit

import h11
from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillhouse.serving.server.bodies import RequestError, busy

#: routes that need no bearer token and are never refused by `Room`, for the probes of an orchestrator
OPEN_PATHS = ("/healthz",)
#: seconds that a client has for sending a body, and for reading each piece of an answer
BODY_SECONDS, SEND_SECONDS = 120.0, 120.0
_PIECE = 2**20


def gate(app: ASGIApp, refusal: Callable[[Scope], RequestError | None]) -> ASGIApp:
    """Answer the error that `refusal` returns for a request, if it returns one, except on `OPEN_PATHS`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        error = None if is_open else refusal(scope)
        await (app if error is None else error.response())(scope, receive, send)

    return answer


def token_error(token: str, scope: Scope) -> RequestError | None:
    """The error of a request without the bearer token."""
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) == 1 and hmac.compare_digest(sent[0], f"Bearer {token}".encode()):
        return None
    return RequestError(
        HTTPStatus.UNAUTHORIZED,
        "expected the header `Authorization: Bearer` with this server's token",
        headers={"WWW-Authenticate": "Bearer"} | _unread(scope),
    )


def name_error(scope: Scope) -> RequestError | None:
    """For a server without a token on loopback: the error of a request to another name, or of another site's page.

    A browser on this machine reaches the server, too. A page of another site could make it do so, by a form, or by a
    name of its own that it lets point to 127.0.0.1 (DNS rebinding), by which it could read the answers.
    """
    instead = "start it with a token (STILLHOUSE_TOKEN) for clients that use another name"
    refusals = {
        b"host": (
            HTTPStatus.MISDIRECTED_REQUEST,
            "this server has no token and serves this machine alone: expected localhost or 127.0.0.1 as its host "
            f"(the header `Host`); {instead}",
        ),
        b"origin": (
            HTTPStatus.FORBIDDEN,
            f"a request of another site's page (the header `Origin`), and this server has no token; {instead}",
        ),
    }
    for name, value in scope["headers"]:
        if name in refusals:
            try:
                host = urlsplit((b"//" + value if name == b"host" else value).decode("latin-1")).hostname or ""
            except ValueError:
                host = ""
            if not is_loopback(host):
                return RequestError(*refusals[name], headers=_unread(scope))
    return None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name other than localhost


class _UnreadError(Exception):
    """The client does not read its answer."""


def answered_by_protocol(app: ASGIApp) -> ASGIApp:
    """The outermost layer, which drops answers that cannot be sent. uvicorn itself answers invalid HTTP; if a route
    has begun to answer before, the route's answer fails. The connection of a client that does not read is closed.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    await send(message)
            except TimeoutError as error:
                raise _UnreadError from error

        with suppress(h11.LocalProtocolError, _UnreadError):  # uvicorn closes a connection without a whole answer
            await app(scope, receive, in_time)

    return answer


def counted(app: ASGIApp, count: Callable[[str, int, float], None]) -> ASGIApp:
    """Call `count(path, status, seconds)` after each answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started, status = asyncio.get_running_loop().time(), int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting)
        finally:
            count(scope["path"], status, asyncio.get_running_loop().time() - started)

    return answer


class Bodies:
    """Reads request bodies. Each body has its own limit; all bodies in memory have at most `total` bytes together."""

    def __init__(self, total: int):
        self._total, self._held = total, 0

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Yield a request's body. It counts towards `total` until the context ends.

        Raises RequestError if the body is too large, is sent too slowly, or would exceed `total`.
        """
        content, unread = bytearray(), _unread(request.scope)
        too_large = RequestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is too large: expected at most {limit:,} bytes of this content type",
            headers=unread,
        )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for chunk in request.stream():
                        if len(content) + len(chunk) > limit:
                            raise too_large
                        if self._held + len(chunk) > self._total:
                            raise busy("too many bodies are being read: try again", headers=unread)
                        self._held += len(chunk)
                        content += chunk
            except TimeoutError as error:
                raise RequestError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the body did not arrive within {BODY_SECONDS:g} s",
                    headers={"Connection": "close"},
                ) from error
            yield bytes(content)
        finally:
            self._held -= len(content)


class InPieces(Response):
    """A response that is sent in pieces, and calls `sent` after it was sent, or after sending has failed."""

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


def _unread(scope: Scope) -> dict[str, str]:
    """Headers of an answer that is sent before the request's body was read. The rest of the body is discarded (see
    `drained`); a client that waits for `100 Continue` will not send it, so that its connection is closed.
    """
    return {"Connection": "close"} if any(name == b"expect" for name, _ in scope["headers"]) else {}
