"""The routes of the server of a teacher's signals (see `routes.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.serving.server import completions
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
from stillhouse.serving.wire import (
    JSON,
    SAFETENSORS,
    ScoreBody,
    decode_request,
    encode_answer,
)
from stillhouse.signals.scorer import Part


@dataclass(frozen=True)
class Service(Served):
    """Everything that the routes need. files: those of `folder` that clients can get, and their sha256."""

    identity: str
    folder: Path
    files: dict[str, str]
    head: str
    tokenizer: PreTrainedTokenizerBase


def make_app(service: Service) -> FastAPI:
    app = new_app(service)
    _add_files(app, service)
    _add_scoring(app, service)
    return app


def _add_files(app: FastAPI, service: Service) -> None:
    @app.get("/v1/head", responses=_file("the teacher's output head, as a safetensors file"))
    async def head() -> FileResponse:
        return FileResponse(service.folder / service.head, media_type=SAFETENSORS)

    @app.get("/v1/files/{name}", responses=_file("a file of the teacher's folder") | errors(404))
    async def files(name: str) -> FileResponse:
        """A configuration or tokenizer file. The names are those of `files` in `/v1/info`."""
        if name not in service.files or name == service.head:
            raise RequestError(
                HTTPStatus.NOT_FOUND, "no such file: expected a name of `files` in /v1/info", param="name"
            )
        return FileResponse(service.folder / name, media_type="application/octet-stream")


def _add_scoring(app: FastAPI, service: Service) -> None:
    bodies, limits = Bodies(service.limits.bodies_bytes), service.limits
    failures = errors(400, 404, 408, 413, 415, 422, 429, 500, 503)

    @app.post("/v1/score", responses=_file("see stillhouse/serving/wire.py") | failures, openapi_extra=_score_body())
    async def score(request: Request) -> Response:
        """The teacher's signals for token ids."""
        kind = content_type(request, JSON, SAFETENSORS)

        def parse(content: bytes) -> tuple[Any, list[Part]]:
            try:
                signal, documents = decode_request(content, kind, limits.max_sequences)
            except ValueError as error:
                raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
            return signal, limits.parts(signal, documents)

        limit = limits.json_bytes if kind == JSON else limits.binary_bytes
        async with bodies.read(request, limit) as content:
            signal, parts = await in_thread_if_large(parse, content, len(content))

        def encode(found: list[dict[str, Tensor]]) -> bytes:
            return encode_answer(service.identity, signal, found)

        return await answered(service, request, parts, encode, SAFETENSORS, _bytes)

    @app.post("/v1/completions", response_class=JSONResponse, responses=failures, openapi_extra=_completion_body())
    async def complete(request: Request) -> Response:
        """Prompt log-probabilities, as vLLM answers them."""
        content_type(request, JSON)

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
            body, parts = await in_thread_if_large(parse, content, len(content))

        def encode(found: list[dict[str, Tensor]]) -> bytes:
            content = completions.answer(body, service.name, parts, found, service.tokenizer)
            return bytes(JSONResponse(content).body)

        return await answered(service, request, parts, encode, JSON, _bytes)


def _bytes(found: Sequence[dict[str, Tensor]]) -> int:
    return sum(each.nbytes for tensors in found for each in tensors.values())


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
