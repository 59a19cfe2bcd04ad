"""The routes of the server that generates completions: `POST /inference/v1/generate` and `POST /v1/weights`.

A request for a completion has token ids in vLLM's format, one prompt, and gets one completion. Log-probabilities are
those at the sampling temperature, over the full vocabulary, before top_p, top_k and min_p. (vLLM's `--logprobs-mode
processed_logprobs` gives those after them.) A request with an unknown or unsupported field is refused.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from stillhouse.data.media import DocumentMedia
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving.image_wire import decode_prompt
from stillhouse.serving.server.application import BINARY, Application, Parsed, content_type, required_body
from stillhouse.serving.server.bodies import (
    ENDING,
    RequestError,
    busy,
    encode_json,
    errors,
    parse_json,
    refused,
    usage,
)
from stillhouse.serving.server.generate.weight_updates import WeightUpdates
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.strict_body import FirstWrong, StrictBody, TokenId
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

        A prompt with images is a safetensors body (see stillhouse/serving/image_wire.py).
        """
        images = None
        if kind == SAFETENSORS:
            try:
                content, images = decode_prompt(content)
            except ValueError as error:
                raise refused(str(error), "images") from error
        body = parse_json(content, GenerateBody)
        application.require_model(body.model)
        return [generation_part(body, role.limits, eos_ids, images)], partial(generation_answer, body, role.name)


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


StopText = Annotated[str, Field(min_length=1, max_length=256)]
#: temperatures between 0 and this one would overflow: vLLM replaces them by this one, and this server refuses them
LOWEST_TEMPERATURE = 0.01


class SamplingBody(StrictBody):
    """How the tokens are sampled. Fields with one allowed value exist for clients that always send them."""

    n: Literal[1] = 1
    max_tokens: int = Field(default=16, ge=1, description="tokens of the completion, its end included")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0: the top token")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31, description="0 or -1: all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: a random one")
    stop: StopText | FirstWrong[StopText] | None = Field(
        default=None, description="at most 16; they stay in the completion"
    )
    stop_token_ids: FirstWrong[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool = Field(default=False, description="end at stop_token_ids alone, not at the model's own ends")
    logprobs: Literal[0, 1] | None = Field(default=None, description="0 or 1: that of the token itself")
    prompt_logprobs: None = None
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    detokenize: bool = Field(default=False, description="no effect: the answer has token ids")
    skip_special_tokens: bool = Field(default=True, description="no effect: the answer has token ids")
    include_stop_str_in_output: bool = Field(default=True, description="no effect: the tokens stay in the answer")


class GenerateBody(StrictBody):
    token_ids: FirstWrong[TokenId] = Field(min_length=1, description="the prompt")
    sampling_params: SamplingBody
    model: str | None = Field(default=None, description="the name of this server's model, if given")
    request_id: str | None = Field(default=None, max_length=256)
    return_token_ids: bool = Field(default=False, description="whether the answer repeats the prompt")
    output_mode: Literal["tokens"] = "tokens"
    stream: Literal[False] = False


@dataclass(frozen=True, eq=False)
class GenerationPart:
    """A requested completion.

    tokens: the most tokens of prompt and completion together. images: those of the prompt, if it has any.
    """

    request: GenerationRequest
    sampling: Sampling
    tokens: int
    images: DocumentMedia | None = None

    @property
    def has_media(self) -> bool:
        return self.images is not None


@dataclass(frozen=True, eq=False)
class VersionedCompletion:
    """A completion and the version of the weights. stop: the stop text that ended the completion, if there is one."""

    completion: Completion
    version: str
    stop: str | None


def generation_part(
    body: GenerateBody, limits: Limits, eos_ids: Sequence[int], images: DocumentMedia | None = None
) -> GenerationPart:
    """The part for the queue. eos_ids: the model's end-of-sequence ids. Raises RequestError beyond the limits."""
    options = body.sampling_params
    limits.check_documents([body.token_ids], "token_ids")
    tokens = len(body.token_ids) + options.max_tokens
    if tokens > limits.max_tokens:
        raise refused(
            f"{len(body.token_ids)} tokens of the prompt and max_tokens={options.max_tokens}: expected at most "
            f"{limits.max_tokens} together (the model's positions, and the server's --batch-tokens)",
            "sampling_params.max_tokens",
        )
    if 0 < options.temperature < LOWEST_TEMPERATURE:
        raise refused(
            f"temperature={options.temperature:g}: expected 0, or at least {LOWEST_TEMPERATURE:g}",
            "sampling_params.temperature",
        )
    stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    if len(stop) > 16:
        raise refused(f"{len(stop)} stop texts: expected at most 16", "sampling_params.stop")
    ends = {*(options.stop_token_ids or ()), *(() if options.ignore_eos else eos_ids)}
    sampling = Sampling(
        max_new_tokens=limits.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=max(options.top_k, 0),
        min_p=options.min_p,
        stop=stop,
        eos_ids=tuple(sorted(ends)),
    )
    seed = secrets.randbits(63) if options.seed is None else options.seed
    tensors = {} if images is None else images.read().tensors
    prompt = np.array(body.token_ids, dtype=np.int32)
    request = GenerationRequest(0, prompt, seed, options.max_tokens, media_tensors=tensors)
    return GenerationPart(request, sampling, tokens, images)


def generation_answer(body: GenerateBody, model: str, results: Sequence[VersionedCompletion]) -> bytes:
    [result] = results
    completion, options = result.completion, body.sampling_params
    ids, log_probs = completion.ids_N.tolist(), completion.log_probs_N.tolist()
    stop_reason: str | int | None = result.stop
    if completion.finish == "stop" and ids[-1] in (options.stop_token_ids or ()):
        stop_reason = ids[-1]
    entries = [  # the token's rank is not computed
        {"token_id": token, "logprob": log_prob, "rank": None, "top_logprobs": []}
        for token, log_prob in zip(ids, log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "finish_reason": completion.finish,
        "stop_reason": stop_reason,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": result.version, "start": 0, "end": len(ids)}],
        "logprobs": None if options.logprobs is None else {"content": entries},
    }
    content = {
        "request_id": body.request_id or f"generate-tokens-{uuid.uuid4().hex[:16]}",
        "model": model,
        "created": int(time.time()),
        "usage": usage(len(body.token_ids), len(ids)),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [choice],
    }
    return encode_json(content)
