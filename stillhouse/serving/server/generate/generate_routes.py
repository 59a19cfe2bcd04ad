"""The routes of the server that generates completions: `POST /inference/v1/generate` and `POST /v1/weights`."""

import asyncio
from collections.abc import Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from stillhouse.serving.prompt_wire import decode_prompt
from stillhouse.serving.server.application import BINARY, Application, Parsed, content_type, required_body
from stillhouse.serving.server.bodies import parse_json
from stillhouse.serving.server.generate import token_completions
from stillhouse.serving.server.generate.token_completions import GenerateBody, VersionedCompletion
from stillhouse.serving.server.generate.weight_updates import WeightUpdates
from stillhouse.serving.server.request_errors import ENDING, RequestError, busy, errors, refused
from stillhouse.serving.strict_body import StrictBody
from stillhouse.serving.wire import JSON, SAFETENSORS

#: the approximate size of an answer per token
_TOKEN_BYTES = 64
_WEIGHTS_BYTES = 16 * 1024


class WeightsBody(StrictBody):
    """folder: a folder of published weights on this machine (see `publish_weights.py`). version: the label of later
    completions. manifest: the sha256 of the folder's manifest.json that the run has written; null: any manifest.
    """

    folder: str = Field(min_length=1, max_length=4096)
    version: str = Field(pattern=r"^[!-~]{1,128}$")
    manifest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


def add_generate_route(application: Application, eos_ids: Sequence[int]) -> None:
    """eos_ids: the end-of-sequence ids of the model."""
    role = application.role

    def result_bytes(results: Sequence[VersionedCompletion]) -> int:
        return sum(_TOKEN_BYTES * len(result.completion.ids_N) for result in results)

    @application.operation(
        "/inference/v1/generate", {JSON: GenerateBody.model_json_schema(), SAFETENSORS: BINARY}, result_bytes
    )
    def generate(content: bytes, kind: str) -> Parsed:
        """A completion as token ids, with log-probabilities and the version of the weights, in vLLM's format.

        A prompt with images is a safetensors body (see stillhouse/serving/prompt_wire.py).
        """
        images = None
        if kind == SAFETENSORS:
            try:
                content, images = decode_prompt(content)
            except ValueError as error:
                raise refused(str(error), "images") from error
        body = parse_json(content, GenerateBody)
        application.require_model(body.model)
        return [token_completions.part(body, role.limits, eos_ids, images)], partial(
            token_completions.answer, body, role.name
        )


def add_weights_route(application: Application, updates: WeightUpdates) -> None:
    lock = asyncio.Lock()

    @application.api.post(
        "/v1/weights",
        response_class=JSONResponse,
        responses=errors(400, 408, 413, 415, 429, 500, 503),
        openapi_extra=required_body({JSON: WeightsBody.model_json_schema()}),
    )
    async def weights(request: Request) -> Response:
        """Load a folder of published weights for all later batches. Answers when the weights are in use."""
        content_type(request, JSON)
        async with application.bodies.read(request, _WEIGHTS_BYTES) as content:
            body = parse_json(content, WeightsBody)
        if application.queue.is_draining:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING)
        if lock.locked():
            raise busy("other weights are being loaded: try again")
        async with lock:
            try:
                read = await run_in_threadpool(updates.read, Path(body.folder), body.manifest)
            except ValueError as error:
                raise refused(str(error), "folder") from error
            await asyncio.wrap_future(updates.submit(read, body.version))
        application.role.info["version"] = body.version
        return JSONResponse({"version": body.version})
