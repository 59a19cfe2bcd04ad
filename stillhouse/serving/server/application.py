"""The server's application: the routes of its state, the way of a request through the queue, and errors.

A role adds the routes of what its model computes (`score/`, `generate/`). All routes run in the HTTP thread and never
touch the model: they only fill the queue.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stillhouse import __version__
from stillhouse.models import NotFiniteError
from stillhouse.serving.server.gate import Answer, BearerToken, Bodies, Counted, until_disconnected
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.server.metrics import Metrics
from stillhouse.serving.server.request_errors import RequestError, error_content, error_response
from stillhouse.serving.server.request_queue import (
    BatchFailedError,
    DrainingError,
    Part,
    QueueFullError,
    RequestQueue,
    Ticket,
)

#: up to this size, a body is parsed and an answer is encoded in the HTTP thread itself
AT_ONCE_BYTES = 16 * 1024

Body = TypeVar("Body")
Argument = TypeVar("Argument")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Service:
    """What the routes of both roles need.

    name: the model's name. info: the answer of `GET /v1/info`. token: the bearer token, if there is one.
    """

    name: str
    info: dict[str, Any]
    limits: Limits
    queue: RequestQueue
    metrics: Metrics
    token: str | None

    def require_model(self, name: str | None) -> None:
        """Raise RequestError for the name of another model; None is this one."""
        if name not in (None, self.name):
            raise RequestError(HTTPStatus.NOT_FOUND, f"The model `{name}` does not exist.", param="model")


@dataclass(frozen=True)
class Operation(Generic[Body]):
    """A kind of request that the model answers.

    body_bytes: for each content type, the most bytes of a body.
    parse: reads a body of a content type and divides it into parts for the model; raises RequestError.
    encode: makes the answer from the body, its parts and the model's results.
    media_type: of the answer.
    result_bytes: the size of the results; a large answer is encoded in another thread.
    """

    body_bytes: Mapping[str, int]
    parse: Callable[[bytes, str], tuple[Body, Sequence[Part]]]
    encode: Callable[[Body, Sequence[Any], list[Any]], bytes]
    media_type: str
    result_bytes: Callable[[Sequence[Any]], int]


class Application:
    """The ASGI application of a server. api: roles add their routes to it."""

    def __init__(self, service: Service):
        # no documentation page, which would load remote scripts; no redirects, which name the host of the header
        self.api = FastAPI(
            title="stillhouse serve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.service, self.bodies = service, Bodies(service.limits.bodies_bytes)
        _add_state(self.api, service)
        _add_errors(self.api)
        if service.token is not None:
            self.api.add_middleware(BearerToken, token=service.token)
        self.api.add_middleware(Counted, count=service.metrics.request)

    async def respond(self, request: Request, operation: Operation[Any]) -> Response:
        """Read a request, queue it, wait for the model or for the client to leave, and encode the answer."""
        kind = content_type(request, *operation.body_bytes)
        async with self.bodies.read(request, operation.body_bytes[kind]) as content:
            body, parts = await _in_thread_if_large(
                lambda content: operation.parse(content, kind), content, len(content)
            )
        queue = self.service.queue
        ticket = _submitted(queue, parts)
        is_sending = False
        try:
            results = await _unless_disconnected(request, ticket)
            answer = await _in_thread_if_large(
                lambda results: operation.encode(body, parts, results), results, operation.result_bytes(results)
            )
            is_sending = True
            return Answer(answer, operation.media_type, lambda: queue.release(ticket))
        except NotFiniteError as error:
            raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
        except BatchFailedError as error:
            raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        finally:
            if not is_sending:
                queue.release(ticket)


def content_type(request: Request, *expected: str) -> str:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in expected:
        raise RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content type '{kind}': expected {' or '.join(expected)}"
        )
    return kind


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers with these statuses, for the OpenAPI document."""
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {
        status: {"description": error_content(status, "")["error"]["type"], "content": content} for status in statuses
    }


def required_body(schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A request's body for the OpenAPI document. schemas: by content type."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _submitted(queue: RequestQueue, parts: Sequence[Part]) -> Ticket:
    try:
        return queue.submit(parts)
    except QueueFullError as error:
        headers = {"Retry-After": str(error.seconds)}
        raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, str(error), headers=headers) from error
    except DrainingError as error:
        headers = {"Connection": "close"}
        raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), headers=headers) from error


async def _in_thread_if_large(function: Callable[[Argument], Result], argument: Argument, size: int) -> Result:
    """Call a function: for a large argument in another thread, so that the other clients need not wait.

    A small one is faster at once: a change of threads waits for the model's thread to give up the interpreter.
    """
    return function(argument) if size < AT_ONCE_BYTES else await run_in_threadpool(function, argument)


async def _unless_disconnected(request: Request, ticket: Ticket) -> list[Any]:
    """The model's results. Raises ClientDisconnect if the client leaves first."""
    results = asyncio.wrap_future(ticket.results)
    leaving = asyncio.ensure_future(until_disconnected(request))
    either: set[asyncio.Future[Any]] = {results, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise ClientDisconnect
        return results.result()
    finally:
        leaving.cancel()
        results.cancel()


def _add_state(api: FastAPI, service: Service) -> None:
    @api.get("/v1/info")
    async def info() -> dict[str, Any]:
        """What the model is, and what may be asked of it."""
        return service.info

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": service.name,
            "object": "model",
            "owned_by": "stillhouse",
            "root": service.name,
            "parent": None,
            "max_model_len": service.limits.max_tokens,
        }
        return {"object": "list", "data": [model]}

    @api.get("/healthz", responses=errors(503))
    async def healthz() -> Response:
        if service.queue.is_draining:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to end")
        return JSONResponse({"status": "ready"})

    @api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(api: FastAPI) -> None:
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
        api.add_exception_handler(kind, handler)
