"""The routes of the server. They run in the HTTP thread and never touch the model: they only fill the queue."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.teachers.scorer import NotFiniteError, Part
from stillhouse.teachers.server import completions
from stillhouse.teachers.server.batching import (
    DrainingError,
    QueueFullError,
    RequestQueue,
    ScoringFailedError,
    Ticket,
)
from stillhouse.teachers.server.errors import RequestError, error_content, error_response
from stillhouse.teachers.server.gate import Answer, BearerToken, Bodies, Counted, until_disconnected
from stillhouse.teachers.server.limits import Limits
from stillhouse.teachers.server.metrics import Metrics
from stillhouse.teachers.wire import JSON, SAFETENSORS, ScoreBody, decode_request, encode_answer

#: up to this size, a body is parsed and an answer is encoded in the HTTP thread itself
AT_ONCE_BYTES = 16 * 1024

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Service:
    """Everything that the routes need. files: those of `folder` that clients can get, and their sha256."""

    name: str
    identity: str
    info: dict[str, Any]
    folder: Path
    files: dict[str, str]
    head: str
    tokenizer: PreTrainedTokenizerBase
    limits: Limits
    queue: RequestQueue
    metrics: Metrics
    token: str | None


def make_app(service: Service) -> FastAPI:
    """The application. Its documentation page is off, because it would load scripts from elsewhere."""
    app = FastAPI(title="stillhouse serve", version=__version__, docs_url=None, redoc_url=None)
    _add_files(app, service)
    _add_state(app, service)
    _add_scoring(app, service)
    _add_errors(app)
    if service.token is not None:
        app.add_middleware(BearerToken, token=service.token)
    app.add_middleware(Counted, count=service.metrics.request)
    return app


def _add_files(app: FastAPI, service: Service) -> None:
    @app.get("/v1/head", responses=_file("the teacher's output head, as a safetensors file"))
    async def head() -> FileResponse:
        return FileResponse(service.folder / service.head, media_type=SAFETENSORS)

    @app.get("/v1/files/{name}", responses=_file("a file of the teacher's folder") | _errors(404))
    async def files(name: str) -> FileResponse:
        """A configuration or tokenizer file. The names are those of `files` in `/v1/info`."""
        if name not in service.files or name == service.head:
            raise RequestError(
                HTTPStatus.NOT_FOUND, "no such file: expected a name of `files` in /v1/info", param="name"
            )
        return FileResponse(service.folder / name, media_type="application/octet-stream")


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/info")
    async def info() -> dict[str, Any]:
        """What the teacher is, and what may be asked of it."""
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

    @app.get("/healthz", responses=_errors(503))
    async def healthz() -> Response:
        if service.queue.is_draining:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to end")
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_scoring(app: FastAPI, service: Service) -> None:
    bodies, limits = Bodies(service.limits.bodies_bytes), service.limits
    failures = _errors(400, 404, 408, 413, 415, 422, 429, 500, 503)

    @app.post("/v1/score", responses=_file("see stillhouse/teachers/wire.py") | failures, openapi_extra=_score_body())
    async def score(request: Request) -> Response:
        """The teacher's signals for token ids."""
        kind = _content_type(request, JSON, SAFETENSORS)

        def parse(content: bytes) -> tuple[Any, list[Part]]:
            try:
                signal, documents = decode_request(content, kind)
            except ValueError as error:
                raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
            return signal, limits.parts(signal, documents)

        limit = limits.json_bytes if kind == JSON else limits.binary_bytes
        async with bodies.read(request, limit) as content:
            signal, parts = await _in_thread_if_large(parse, content, len(content))

        def encode(found: list[dict[str, Tensor]]) -> bytes:
            return encode_answer(service.identity, signal, found)

        return await _answered(service, request, parts, encode, SAFETENSORS)

    @app.post("/v1/completions", response_class=JSONResponse, responses=failures, openapi_extra=_completion_body())
    async def complete(request: Request) -> Response:
        """Prompt log-probabilities, as vLLM answers them."""
        _content_type(request, JSON)

        def parse(content: bytes) -> tuple[completions.CompletionBody, list[Part]]:
            try:
                body = completions.parse(content)
                if body.model not in (None, service.name):
                    message = f"The model `{body.model}` does not exist."
                    raise RequestError(HTTPStatus.NOT_FOUND, message, param="model")
                return body, completions.parts(body, service.tokenizer, limits)
            except completions.CompletionError as error:
                raise RequestError(HTTPStatus.BAD_REQUEST, str(error), param=error.param) from error

        async with bodies.read(request, limits.json_bytes) as content:
            body, parts = await _in_thread_if_large(parse, content, len(content))

        def encode(found: list[dict[str, Tensor]]) -> bytes:
            content = completions.answer(body, service.name, parts, found, service.tokenizer)
            return bytes(JSONResponse(content).body)

        return await _answered(service, request, parts, encode, JSON)


async def _answered(
    service: Service,
    request: Request,
    parts: list[Part],
    encode: Callable[[list[dict[str, Tensor]]], bytes],
    media_type: str,
) -> Response:
    """Queue a request, wait for the model or for the client to leave, and encode the answer."""
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
        size = sum(each.nbytes for tensors in found for each in tensors.values())
        content = await _in_thread_if_large(encode, found, size)
        is_sending = True
        return Answer(content, media_type, lambda: service.queue.release(ticket))
    except NotFiniteError as error:
        raise RequestError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from error
    except ScoringFailedError as error:
        raise RequestError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
    finally:
        if not is_sending:
            service.queue.release(ticket)


async def _in_thread_if_large(function: Callable[[Given], Made], given: Given, size: int) -> Made:
    """Call a function: for a large argument in another thread, so that the other clients need not wait.

    A small one is faster at once: a change of threads waits for the model's thread to give up the interpreter.
    """
    return function(given) if size < AT_ONCE_BYTES else await run_in_threadpool(function, given)


async def _unless_disconnected(request: Request, ticket: Ticket) -> list[dict[str, Tensor]]:
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


def _content_type(request: Request, *expected: str) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in expected:
        raise RequestError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"content type '{given}': expected {' or '.join(expected)}"
        )
    return given


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"type": "object", "required": ["error"]}}}
    return {
        status: {"description": error_content(status, "")["error"]["type"], "content": content} for status in statuses
    }


def _file(what: str) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {SAFETENSORS: {"schema": {"type": "string", "format": "binary"}}}
    return {200: {"description": what, "content": content}}


def _score_body() -> dict[str, Any]:
    binary = {"schema": {"type": "string", "format": "binary"}}
    json_body = {"schema": ScoreBody.model_json_schema()}
    return {"requestBody": {"required": True, "content": {JSON: json_body, SAFETENSORS: binary}}}


def _completion_body() -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {JSON: {"schema": completions.CompletionBody.model_json_schema()}},
        }
    }
