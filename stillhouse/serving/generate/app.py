"""The routes of the server that writes completions (see `serving/server/routes.py`)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from stillhouse.serving.generate import protocol
from stillhouse.serving.generate.protocol import (
    GenerateBody,
    GenerationPart,
    WeightsBody,
    Written,
)
from stillhouse.serving.generate.updates import WeightUpdates
from stillhouse.serving.server.errors import RequestError
from stillhouse.serving.server.gate import Bodies
from stillhouse.serving.server.routes import (
    Served,
    answered,
    content_type,
    errors,
    in_thread_if_large,
    new_app,
)
from stillhouse.serving.wire import JSON

#: an answer has about so many bytes for each token
_TOKEN_BYTES = 64
_WEIGHTS_BYTES = 16 * 1024


@dataclass(frozen=True)
class GenerationService(Served):
    """Everything that the routes need. eos: the model's own ends of sequence."""

    eos: tuple[int, ...]
    updates: WeightUpdates


def make_app(service: GenerationService) -> FastAPI:
    app = new_app(service)
    bodies = Bodies(service.limits.bodies_bytes)
    _add_generation(app, service, bodies)
    _add_weights(app, service, bodies)
    return app


def _add_generation(app: FastAPI, service: GenerationService, bodies: Bodies) -> None:
    failures = errors(400, 404, 408, 413, 415, 422, 429, 500, 503)

    @app.post(
        "/inference/v1/generate",
        response_class=JSONResponse,
        responses=failures,
        openapi_extra=_body(GenerateBody),
    )
    async def generate(request: Request) -> Response:
        """A completion of token ids, with log-probabilities and the version of the weights, as vLLM answers."""
        content_type(request, JSON)

        def parse(content: bytes) -> tuple[GenerateBody, GenerationPart]:
            body: GenerateBody = protocol.parse(content, GenerateBody)
            if body.model not in (None, service.name):
                message = f"The model `{body.model}` does not exist."
                raise RequestError(HTTPStatus.NOT_FOUND, message, param="model")
            return body, protocol.part(body, service.limits, service.eos)

        async with bodies.read(request, service.limits.json_bytes) as content:
            body, part = await in_thread_if_large(parse, content, len(content))

        def encode(found: Sequence[Written]) -> bytes:
            return bytes(JSONResponse(protocol.answer(body, service.name, found[0])).body)

        return await answered(service, request, [part], encode, JSON, _bytes)


def _add_weights(app: FastAPI, service: GenerationService, bodies: Bodies) -> None:
    lock = asyncio.Lock()

    @app.post(
        "/v1/weights",
        response_class=JSONResponse,
        responses=errors(400, 408, 413, 415, 429, 500, 503),
        openapi_extra=_body(WeightsBody),
    )
    async def weights(request: Request) -> Response:
        """Write with the weights of a published folder from the next batch on. Answers when they are in use."""
        content_type(request, JSON)
        async with bodies.read(request, _WEIGHTS_BYTES) as content:
            body: WeightsBody = protocol.parse(content, WeightsBody)
        if service.queue.is_draining:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is about to end")
        if lock.locked():
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                "other weights are being loaded: try again",
                headers={"Retry-After": "1"},
            )
        async with lock:
            try:
                read = await run_in_threadpool(service.updates.read, Path(body.folder), body.version, body.manifest)
            except ValueError as error:
                raise RequestError(HTTPStatus.BAD_REQUEST, str(error), param="folder") from error
            try:
                await asyncio.wrap_future(service.updates.submit(read))
            except ValueError as error:
                raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        service.info["version"] = service.updates.version
        return JSONResponse({"version": body.version})


def _bytes(found: Sequence[Written]) -> int:
    return sum(_TOKEN_BYTES * len(each.completion.ids_N) for each in found)


def _body(kind: type[GenerateBody] | type[WeightsBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {JSON: {"schema": kind.model_json_schema()}}}}
