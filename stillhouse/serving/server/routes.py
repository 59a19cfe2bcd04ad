"""What the applications of all our servers share: state routes, the way of a request through the queue, errors.

The routes run in the HTTP thread and never touch the model: they only fill the queue.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stillhouse import __version__
from stillhouse.serving.server.batching import (
    DrainingError,
    Part,
    QueueFullError,
    RequestQueue,
    ScoringFailedError,
    Ticket,
)
from stillhouse.serving.server.errors import RequestError, error_content, error_response
from stillhouse.serving.server.gate import (
    Answer,
    BearerToken,
    Counted,
    until_disconnected,
)
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.server.metrics import Metrics
from stillhouse.signals.scorer import NotFiniteError

#: up to this size, a body is parsed and an answer is encoded in the HTTP thread itself
AT_ONCE_BYTES = 16 * 1024

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Served:
    """What the routes of every server need. info: the answer of `GET /v1/info`."""

    name: str
    info: dict[str, Any]
    limits: Limits
    queue: RequestQueue
    metrics: Metrics
    token: str | None


def new_app(service: Served) -> FastAPI:
    """An application with the routes of its state. It has no documentation page, which would load remote scripts, and
    redirects nothing: a redirect names the host of the request's header.
    """
    options: dict[str, Any] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="stillhouse serve", version=__version__, **options)
    _add_state(app, service)
    _add_errors(app)
    if service.token is not None:
        app.add_middleware(BearerToken, token=service.token)
    app.add_middleware(Counted, count=service.metrics.request)
    return app


async def answered(
    service: Served,
    request: Request,
    parts: Sequence[Part],
    encode: Callable[[list[Any]], bytes],
    media_type: str,
    size: Callable[[list[Any]], int],
) -> Response:
    """Queue a request, wait for the model or for the client to leave, and encode the answer.

    size: the bytes of what the model has computed; a large answer is encoded in another thread.
    """
    try:
        ticket = service.queue.submit(parts)
    except QueueFullError as error:
        headers = {"Retry-After": str(error.seconds)}
        raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, str(error), headers=headers) from error
    except DrainingError as error:
        headers = {"Connection": "close"}
        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers=headers) from error
    is_sending = False
    try:
        found = await _unless_disconnected(request, ticket)
        content = await in_thread_if_large(encode, found, size(found))
        is_sending = True
        return Answer(content, media_type, lambda: service.queue.release(ticket))
    except NotFiniteError as error:
        raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    except ScoringFailedError as error:
        raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
    finally:
        if not is_sending:
            service.queue.release(ticket)


async def in_thread_if_large(function: Callable[[Given], Made], given: Given, size: int) -> Made:
    """Call a function: for a large argument in another thread, so that the other clients need not wait.

    A small one is faster at once: a change of threads waits for the model's thread to give up the interpreter.
    """
    return function(given) if size < AT_ONCE_BYTES else await run_in_threadpool(function, given)


async def _unless_disconnected(request: Request, ticket: Ticket) -> list[Any]:
    """The model's answer. Raises ClientDisconnect if the client leaves first."""
    answer = asyncio.wrap_future(ticket.answer)
    leaving = asyncio.ensure_future(until_disconnected(request))
    either: set[asyncio.Future[Any]] = {answer, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        leaving.cancel()
        answer.cancel()


def content_type(request: Request, *expected: str) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in expected:
        raise RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content type '{given}': expected {' or '.join(expected)}"
        )
    return given


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {
        status: {"description": error_content(status, "")["error"]["type"], "content": content} for status in statuses
    }


def _add_state(app: FastAPI, service: Served) -> None:
    @app.get("/v1/info")
    async def info() -> dict[str, Any]:
        """What the model is, and what may be asked of it."""
        return service.info

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.name,
            "object": "model",
            "owned_by": "stillhouse",
            "root": service.name,
            "parent": None,
        }
        return {"object": "list", "data": [{**model, "max_model_len": service.limits.max_tokens}]}

    @app.get("/healthz", responses=errors(503))
    async def healthz() -> Response:
        if service.queue.is_draining:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to end")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    async def of_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error.response()

    async def of_routing(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(error.status_code, str(error.detail), headers=error.headers)

    async def of_validation(_: Request, error: Exception) -> Response:
        return error_response(HTTPStatus.BAD_REQUEST, "the request does not have the form of this route")

    async def of_leaving(_: Request, error: Exception) -> Response:
        return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody receives it

    async def of_this_server(_: Request, error: Exception) -> Response:
        return error_response(
            HTTPStatus.INTERNAL_SERVER_ERROR, f"an error of the server itself ({type(error).__name__})"
        )

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
        RequestError: of_request,
        HTTPException: of_routing,
        RequestValidationError: of_validation,
        ClientDisconnect: of_leaving,
        Exception: of_this_server,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
