"""The ASGI application of a server: the routes for the server's state, and the steps from a request to its answer.

A role adds the routes whose answers the model computes. All routes run in the HTTP thread, and none uses the model
itself: they put requests into the queue and wait for the results of the main thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from stillhouse import __version__
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.server.gate import (
    ENDING,
    InPieces,
    RequestError,
    busy,
    errors,
    gate,
    refused,
    scope_error,
    unread_headers,
)
from stillhouse.serving.server.request_queue import Part, RequestQueue, Ticket
from stillhouse.serving.server.role import Role

#: the HTTP thread itself parses bodies and encodes answers that have fewer bytes than this
AT_ONCE_BYTES = 16 * 1024
#: the maximum number of seconds that a client may take to send a body
BODY_SECONDS = 120.0

BINARY: dict[str, Any] = {"type": "string", "format": "binary"}
Result = TypeVar("Result")
#: the parts of a request, and a function that encodes the model's results as the answer
Parsed = tuple[Sequence[Part], Callable[[list[Any]], bytes]]


class Application:
    """The ASGI application of one server.

    api: the FastAPI object with the routes. token: the bearer token that requests need, or None.
    host: the address on which the server listens.
    """

    def __init__(self, role: Role, queue: RequestQueue, token: str | None, host: str):
        self.role, self.queue, self.metrics = role, queue, Metrics(queue)
        # FastAPI's documentation pages would load remote scripts; its redirects would repeat the request's `Host`
        self.api = FastAPI(
            title="stillhouse serve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        #: the maximum and the current number of bytes of all bodies in memory. A body with images stays in memory
        #: until its request is answered
        self._total, self._held = role.limits.bodies_bytes + 2 * role.limits.image_bytes, 0
        for kind, answer in _ERRORS.items():
            self.api.add_exception_handler(kind, partial(_answered, answer))
        self.api.add_middleware(gate, error_of=partial(scope_error, token, host), count=self.metrics.request)

        @self.api.get("/v1/info")
        async def info() -> dict[str, Any]:
            """Describe the model, and the limits of requests."""
            return self.role.info

        @self.api.get("/v1/models")
        async def models() -> dict[str, Any]:
            name, longest = self.role.name, self.role.limits.max_tokens
            model = {"id": name, "object": "model", "owned_by": "stillhouse", "root": name, "parent": None}
            return {"object": "list", "data": [model | {"max_model_len": longest}]}

        @self.api.get("/healthz", responses=errors(503))
        async def healthz() -> Response:
            if self.queue.is_draining:
                return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING).response()
            return JSONResponse({"status": "ready"})

        @self.api.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
        async def metrics() -> Response:
            return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

        role.add_routes(self)

    def require_model(self, name: str | None) -> None:
        """Raise RequestError for a model that is not served. name: the model that a request names, or None."""
        if name not in (None, self.role.name):
            raise RequestError(HTTPStatus.NOT_FOUND, f"The model `{name}` does not exist.", param="model")

    @asynccontextmanager
    async def read_body(self, request: Request, limits: Mapping[str, int]) -> AsyncIterator[tuple[bytes, str]]:
        """Yield a request's body and its content type. The body counts towards the limit of all bodies until the
        context ends.

        limits: the maximum number of bytes, for each accepted content type.
        Raises RequestError if the body has another content type, is too large, is sent too slowly, or would exceed
        the limit of all bodies.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in limits:
            expected = f"content type '{kind}': expected {' or '.join(limits)}"
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, expected)
        content, unread, limit = bytearray(), unread_headers(request.scope), limits[kind]
        too_large = RequestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is too large: expected at most {limit:,} bytes for this content type",
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
            yield bytes(content), kind
        finally:
            self._held -= len(content)

    def add_operation(
        self,
        path: str,
        parse: Callable[[bytes, str], Parsed],
        schemas: Mapping[str, dict[str, Any]],
        result_bytes: Callable[[Sequence[Any]], int],
        media_type: str = JSON,
        answers: Mapping[int | str, dict[str, Any]] | None = None,
    ) -> None:
        """Add a route whose answers the model computes.

        parse: parses a request from the body and its content type; raises RequestError.
        schemas: the JSON schemas of the bodies, by content type. result_bytes: returns the size of results in bytes.
        media_type: the media type of a successful answer. answers: the OpenAPI descriptions of successful answers.
        """

        limits = self.role.limits
        body_bytes = {JSON: limits.json_bytes, SAFETENSORS: limits.binary_bytes + limits.image_bytes}

        async def respond(request: Request) -> Response:
            async with AsyncExitStack() as body:
                reading = self.read_body(request, {kind: body_bytes[kind] for kind in schemas})
                content, kind = await body.enter_async_context(reading)
                parts, encode = await _in_thread_if_large(len(content), parse, content, kind)
                has_images = any(part.has_media for part in parts)
                await _in_thread_if_large(AT_ONCE_BYTES * has_images, self.role.check, parts)
                if not has_images:  # a body with images counts towards the limit until its answer
                    await body.aclose()
                ticket = self.queue.submit(parts)
                with ExitStack() as on_error:
                    on_error.callback(self.queue.release, ticket)
                    results = await _unless_disconnected(request, ticket)
                    answer = await _in_thread_if_large(result_bytes(results), encode, results)
                    on_error.pop_all()
            return InPieces(answer, media_type, lambda: self.queue.release(ticket))

        self.api.add_api_route(
            path,
            respond,
            methods=["POST"],
            name=parse.__name__,
            description=parse.__doc__,
            response_class=JSONResponse,
            responses={**(answers or {}), **errors(400, 404, 408, 413, 415, 422, 429, 500, 503)},
            openapi_extra=required_body(schemas),
        )


def required_body(schemas: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the OpenAPI description of a request's body. schemas: JSON schemas, by content type."""
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


async def _in_thread_if_large(size: int, function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function. If `size` is large, call it in another thread, so that other clients need not wait. If `size`
    is small, another thread would be slower, because it must wait until the model's thread releases the interpreter.
    """
    return function(*arguments) if size < AT_ONCE_BYTES else await run_in_threadpool(function, *arguments)


async def _unless_disconnected(request: Request, ticket: Ticket) -> list[Any]:
    """Wait for the model's results. Raises ClientDisconnect if the client disconnects first."""
    results = asyncio.wrap_future(ticket.results)

    async def left() -> None:  # ends when the client disconnects; the body has already been read
        while (await request.receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.ensure_future(left())
    either: set[asyncio.Future[Any]] = {results, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not results.done():
            raise ClientDisconnect
        return results.result()
    finally:
        leaving.cancel()
        results.cancel()


#: for each type of error in a route, the function that makes the answer (after ClientDisconnect, nobody gets it)
_ERRORS: dict[type[Exception], Callable[[Any], Response]] = {
    RequestError: RequestError.response,
    HTTPException: lambda error: RequestError(error.status_code, str(error.detail), headers=error.headers).response(),
    RequestValidationError: lambda _: refused("the request does not fit the parameters of this route").response(),
    ClientDisconnect: lambda _: Response(status_code=HTTPStatus.BAD_REQUEST),
    Exception: lambda error: RequestError(
        HTTPStatus.INTERNAL_SERVER_ERROR, f"an error of the server itself ({type(error).__name__})"
    ).response(),
}


async def _answered(answer: Callable[[Any], Response], _: Request, error: Exception) -> Response:
    return answer(error)


PATHS = (
    "/v1/score",
    "/v1/completions",
    "/inference/v1/generate",
    "/v1/weights",
    "/v1/info",
    "/v1/head",
    "/v1/models",
    "/healthz",
    "/metrics",
)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counts requests, batches and tokens of one server."""

    def __init__(self, queue: RequestQueue):
        self.registry = registry = CollectorRegistry()
        self._requests = Counter("stillhouse_requests", "answered requests", ["path", "status"], registry=registry)
        self._latency = Histogram(
            "stillhouse_request_seconds", "seconds from a request's header to its answer", ["path"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Counter("stillhouse_tokens", "tokens of the computed batches", registry=registry)
        self.failed_batches = Counter(
            "stillhouse_failed_batches", "batches whose forward pass failed", registry=registry
        )
        self._batch_tokens = Histogram(
            "stillhouse_batch_tokens", "tokens of a batch", buckets=_TOKENS, registry=registry
        )
        self._batch_seconds = Histogram(
            "stillhouse_batch_seconds", "seconds that the model took for a batch", buckets=_SECONDS, registry=registry
        )
        held = Gauge("stillhouse_held_tokens", "tokens of requests without a complete answer", registry=registry)
        held.set_function(lambda: queue.held)
        waiting = Gauge("stillhouse_waiting_sequences", "sequences that wait for the model", registry=registry)
        waiting.set_function(lambda: len(queue.items))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answer. All unknown paths have the same label, so that clients cannot create new time series."""
        label = "/v1/files" if path.startswith("/v1/files/") else path if path in PATHS else "other"
        self._requests.labels(label, str(status)).inc()
        self._latency.labels(label).observe(seconds)

    def batch(self, tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._batch_tokens.observe(tokens)
        self._batch_seconds.observe(seconds)
