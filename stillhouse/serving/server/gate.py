"""Functions that all routes share: errors in the OpenAI API's format as in vLLM, parsing of JSON requests, the check
of the bearer token or of the host name, and answers that are sent in pieces.

The middleware (`gate`) is plain ASGI, so that it can refuse a request before any of the body is read.
"""

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stillhouse.display import message as brief
from stillhouse.serving.wire import require_few_lists

Body = TypeVar("Body", bound=BaseModel)
ENDING = "the server is about to end"
#: routes that need no bearer token and that `Room` never refuses, for the health checks of an orchestrator
OPEN_PATHS = ("/healthz",)
_PIECE = 2**20


class RequestError(Exception):
    """An error that is the answer to a request. param: the invalid field, if the error concerns one field."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def response(self) -> JSONResponse:
        """The HTTP response. The message is shortened and escaped, because it may quote the request."""
        kind, code = error_type(self.status), int(self.status)
        error = {"message": brief(self.message), "type": kind, "param": self.param, "code": code}
        return JSONResponse({"error": error}, self.status, headers=self.headers)


def error_type(status: int) -> str:
    words = HTTPStatus(status).phrase.replace("-", " ").removesuffix(" Error").split()
    return "".join(word.capitalize() for word in words) + "Error"


def refused(message: str, param: str | None = None) -> RequestError:
    """Return the error for an invalid request. param: the invalid field."""
    return RequestError(HTTPStatus.BAD_REQUEST, message, param=param)


def busy(message: str, seconds: int = 1, headers: Mapping[str, str] | None = None) -> RequestError:
    """Return the error of a server that is at a limit. seconds: the time after which the client should try again."""
    headers = {"Retry-After": str(seconds), **(headers or {})}
    return RequestError(HTTPStatus.TOO_MANY_REQUESTS, message, headers=headers)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of the errors with these statuses."""
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {status: {"description": error_type(status), "content": content} for status in statuses}


def parse_json(content: bytes, kind: type[Body], named: int = 2) -> Body:
    """Parse a body. Raises RequestError if it is invalid. named: the maximum depth of a field's path in errors."""
    try:
        require_few_lists(content)
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(level) for level in first["loc"][:named]) or None
        problem = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise refused(f"{param or 'the body'}: {problem}", param) from error
    except ValueError as error:
        raise refused(str(error)) from error


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int | None]:
    """Return the field `usage` of an answer in the OpenAI API."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def scope_error(token: str | None, host: str, scope: Scope) -> RequestError | None:
    """Return the error for a request without the server's bearer token, or None if the request is accepted.

    A server on loopback without a token refuses requests to another host name, and requests from a web page of
    another site. Without this check, such a page could send requests through a browser on this machine: with a form,
    or with a host name that its site resolves to 127.0.0.1 (DNS rebinding). With such a name, the page could also
    read the answers.
    """
    if scope["path"] in OPEN_PATHS or (token is None and not is_loopback(host)):
        return None
    if token is not None:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) == 1 and hmac.compare_digest(sent[0], f"Bearer {token}".encode()):
            return None
        return RequestError(
            HTTPStatus.UNAUTHORIZED,
            "expected the header `Authorization: Bearer` with this server's token",
            headers={"WWW-Authenticate": "Bearer"} | unread_headers(scope),
        )
    instead = "start the server with a token (STILLHOUSE_TOKEN) to allow such requests"
    refusals = {
        b"host": (
            HTTPStatus.MISDIRECTED_REQUEST,
            "this server has no token and serves only this machine: expected localhost or 127.0.0.1 as its host "
            f"(the header `Host`); {instead}",
        ),
        b"origin": (
            HTTPStatus.FORBIDDEN,
            "the request is from a web page of another site (the header `Origin`), and this server has no token; "
            f"{instead}",
        ),
    }
    for name, value in scope["headers"]:
        if name in refusals:
            try:
                site = urlsplit((b"//" + value if name == b"host" else value).decode("latin-1")).hostname or ""
            except ValueError:
                site = ""
            if not is_loopback(site):
                return RequestError(*refusals[name], headers=unread_headers(scope))
    return None


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a host name other than localhost


def gate(
    app: ASGIApp, error_of: Callable[[Scope], RequestError | None], count: Callable[[str, int, float], None]
) -> ASGIApp:
    """Wrap an application: if `error_of` returns an error for a request, answer with this error instead.

    count: is called with the path, the status and the seconds of each answer.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        started, status = asyncio.get_running_loop().time(), int(HTTPStatus.INTERNAL_SERVER_ERROR)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        error = error_of(scope)
        try:
            await (app if error is None else error.response())(scope, receive, noting)
        finally:
            count(scope["path"], status, asyncio.get_running_loop().time() - started)

    return answer


class InPieces(Response):
    """A response that is sent in pieces. It calls `sent` after sending has succeeded or failed."""

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


def unread_headers(scope: Scope) -> dict[str, str]:
    """Return the headers of an answer that is sent before the request's body was read. The rest of the body is
    discarded (see `drained`). But a client that waits for `100 Continue` never sends the body, so its connection is
    closed.
    """
    return {"Connection": "close"} if any(name == b"expect" for name, _ in scope["headers"]) else {}
