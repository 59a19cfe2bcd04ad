"""The routes of a teacher: for its signals, its output head and the other files of its folder."""

from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi.responses import FileResponse
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.serving.server.application import BINARY, Application, Parsed
from stillhouse.serving.server.request_errors import RequestError, errors, refused
from stillhouse.serving.server.score import completions
from stillhouse.serving.server.score.completions import CompletionBody
from stillhouse.serving.wire import HEAD_FILE, JSON, SAFETENSORS, ScoreBody, decode_request, encode_answer


def add_file_routes(application: Application, folder: Path) -> None:
    """folder: the folder of the files that clients can download."""
    names = application.role.info["files"]

    @application.api.get("/v1/head", responses=_file("the teacher's output head, as a safetensors file"))
    async def head() -> FileResponse:
        return FileResponse(folder / HEAD_FILE, media_type=SAFETENSORS)

    @application.api.get("/v1/files/{name}", responses=_file("a file of the teacher's folder") | errors(404))
    async def files(name: str) -> FileResponse:
        """A configuration or tokenizer file. `files` of `/v1/info` has the names."""
        if name not in names or name == HEAD_FILE:
            raise RequestError(
                HTTPStatus.NOT_FOUND, "no such file: expected a name of `files` in /v1/info", param="name"
            )
        return FileResponse(folder / name, media_type="application/octet-stream")


def add_signal_routes(application: Application, tokenizer: PreTrainedTokenizerBase, identity: str) -> None:
    """identity: the hash of the teacher's weights, which each answer of `POST /v1/score` contains."""
    role, limits = application.role, application.role.limits

    @application.operation(
        "/v1/score",
        {JSON: ScoreBody.model_json_schema(), SAFETENSORS: BINARY},
        _tensor_bytes,
        SAFETENSORS,
        _file("see stillhouse/serving/wire.py"),
    )
    def score(content: bytes, kind: str) -> Parsed:
        """The teacher's signals for token ids."""
        try:
            signal, documents = decode_request(content, kind, limits.max_sequences)
        except ValueError as error:
            raise refused(str(error)) from error
        return limits.parts(signal, documents), partial(encode_answer, identity, signal)

    @application.operation("/v1/completions", {JSON: CompletionBody.model_json_schema()}, _tensor_bytes)
    def complete(content: bytes, _: str) -> Parsed:
        """Prompt log-probabilities in vLLM's format."""
        body = completions.parse(content)
        application.require_model(body.model)
        parts = completions.parts(body, tokenizer, limits)
        return parts, partial(completions.answer, body, role.name, parts, tokenizer)


def _tensor_bytes(results: Sequence[dict[str, Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in results for tensor in tensors.values())


def _file(description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {SAFETENSORS: {"schema": BINARY}}}}
