"""The routes of a teacher: its signals, its output head and the other files of its folder."""

from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, Response
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.serving.server.application import Application, Operation, errors, required_body
from stillhouse.serving.server.bodies import refused
from stillhouse.serving.server.request_errors import RequestError
from stillhouse.serving.server.score import completions
from stillhouse.serving.server.score.completions import CompletionBody
from stillhouse.serving.wire import HEAD_FILE, JSON, SAFETENSORS, ScoreBody, decode_request, encode_answer
from stillhouse.signals.scorer import ScoreRequest
from stillhouse.signals.signal_spec import SignalSpec

_BINARY: dict[str, Any] = {"type": "string", "format": "binary"}


def add_file_routes(application: Application, folder: Path) -> None:
    """folder: of the files that clients can get; their names are in `files` of `GET /v1/info`."""
    names = application.service.info["files"]

    @application.api.get("/v1/head", responses=_file("the teacher's output head, as a safetensors file"))
    async def head() -> FileResponse:
        return FileResponse(folder / HEAD_FILE, media_type=SAFETENSORS)

    @application.api.get("/v1/files/{name}", responses=_file("a file of the teacher's folder") | errors(404))
    async def files(name: str) -> FileResponse:
        """A configuration or tokenizer file. The names are those of `files` in `/v1/info`."""
        if name not in names or name == HEAD_FILE:
            raise RequestError(
                HTTPStatus.NOT_FOUND, "no such file: expected a name of `files` in /v1/info", param="name"
            )
        return FileResponse(folder / name, media_type="application/octet-stream")


def add_signal_routes(application: Application, tokenizer: PreTrainedTokenizerBase, identity: str) -> None:
    """identity: the hash of the teacher that each answer of `POST /v1/score` names."""
    failures = errors(400, 404, 408, 413, 415, 422, 429, 500, 503)
    scoring = _scoring(application, identity)
    completing = _completing(application, tokenizer)

    @application.api.post(
        "/v1/score",
        responses=_file("see stillhouse/serving/wire.py") | failures,
        openapi_extra=required_body({JSON: ScoreBody.model_json_schema(), SAFETENSORS: _BINARY}),
    )
    async def score(request: Request) -> Response:
        """The teacher's signals for token ids."""
        return await application.respond(request, scoring)

    @application.api.post(
        "/v1/completions",
        response_class=JSONResponse,
        responses=failures,
        openapi_extra=required_body({JSON: CompletionBody.model_json_schema()}),
    )
    async def complete(request: Request) -> Response:
        """Prompt log-probabilities, as vLLM answers them."""
        return await application.respond(request, completing)


def _scoring(application: Application, identity: str) -> Operation[SignalSpec]:
    limits = application.service.limits

    def parse(content: bytes, kind: str) -> tuple[SignalSpec, list[ScoreRequest]]:
        try:
            signal, documents = decode_request(content, kind, limits.max_sequences)
        except ValueError as error:
            raise refused(str(error), None) from error
        return signal, limits.parts(signal, documents)

    def encode(signal: SignalSpec, parts: Sequence[ScoreRequest], results: list[dict[str, Tensor]]) -> bytes:
        return encode_answer(identity, signal, results)

    body_bytes = {JSON: limits.json_bytes, SAFETENSORS: limits.binary_bytes}
    return Operation(body_bytes, parse, encode, SAFETENSORS, _tensor_bytes)


def _completing(application: Application, tokenizer: PreTrainedTokenizerBase) -> Operation[CompletionBody]:
    service = application.service

    def parse(content: bytes, _: str) -> tuple[CompletionBody, list[ScoreRequest]]:
        body = completions.parse(content)
        service.require_model(body.model)
        return body, completions.parts(body, tokenizer, service.limits)

    def encode(body: CompletionBody, parts: Sequence[ScoreRequest], results: list[dict[str, Tensor]]) -> bytes:
        return bytes(JSONResponse(completions.answer(body, service.name, parts, results, tokenizer)).body)

    return Operation({JSON: service.limits.json_bytes}, parse, encode, JSON, _tensor_bytes)


def _tensor_bytes(results: Sequence[dict[str, Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in results for tensor in tensors.values())


def _file(description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {SAFETENSORS: {"schema": _BINARY}}}}
