"""The role that generates completions: `POST /inference/v1/generate`, and `POST /v1/weights` for new weights.

A request in vLLM's format has one prompt as token ids, and gets one completion. Log-probabilities are computed at the
sampling temperature, over the full vocabulary, before top_p, top_k and min_p. (With `--logprobs-mode
processed_logprobs`, vLLM computes them after top_p, top_k and min_p.)
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

from stillhouse.data import check_vocabulary, load_tokenizer
from stillhouse.data.media import DocumentMedia
from stillhouse.gguf.plain_folder import plain_folder
from stillhouse.models import NotFiniteError, model_fingerprint
from stillhouse.parallel import choose_device, local_folder
from stillhouse.rollout.generate import Generator, check_generation
from stillhouse.rollout.published_folder import AdapterBase
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.rollout.sampler import stop_texts
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.server.accepted_images import AcceptedImages, load_processor_of
from stillhouse.serving.server.application import BINARY, Application, Parsed, required_body
from stillhouse.serving.server.gate import ENDING, RequestError, busy, errors, parse_json, refused, usage
from stillhouse.serving.server.role import Limits, ModelOptions, longest_sequence, model_info
from stillhouse.serving.server.weight_updates import FIRST_VERSION, WeightUpdates
from stillhouse.serving.wire import FirstWrong, ReceivedImages, StrictBody, TokenId, decode_images, decode_prompt

#: the approximate number of bytes of an answer per token
_TOKEN_BYTES = 64
_WEIGHTS_BYTES = 16 * 1024
#: temperatures between 0 and this value would overflow. vLLM replaces them by this value; this server refuses them
LOWEST_TEMPERATURE = 0.01
StopText = Annotated[str, Field(min_length=1, max_length=256)]


@dataclass(frozen=True, eq=False)
class GenerationPart:
    """A completion to generate.

    tokens: the maximum number of tokens of the prompt and the completion together.
    images: the images of the prompt, or None.
    """

    request: GenerationRequest
    tokens: int
    images: DocumentMedia | None = None

    @property
    def has_media(self) -> bool:
        return self.images is not None


@dataclass(frozen=True, eq=False)
class VersionedCompletion:
    """A completion. version: the label of its weights. stop: the stop text that ended it, or None."""

    completion: Completion
    version: str
    stop: str | None


class CompletionWriter:
    """The `Role` of a server that generates completions, in one process. Each request has its own `Sampling`.

    weights_root: see `WeightUpdates`.
    Raises ValueError if the model cannot be loaded, is damaged or cannot generate.
    """

    survives_failures = True

    def __init__(self, options: ModelOptions, batch_tokens: int, weights_root: Path | None = None):
        self.name, device = options.name, choose_device(options.device)
        source = local_folder(plain_folder(options.name), options.revision)
        self._tokenizer = load_tokenizer(source)
        decoder = options.load(source, device, "model", takes_adapters=True)
        check_vocabulary(self._tokenizer, decoder.vocabulary_rows, "model")
        processor = load_processor_of(source, self._tokenizer) if options.images else None
        self._images = AcceptedImages(decoder, processor)
        check_generation(decoder, device, processor)
        self._generator = Generator(
            decoder,
            Sampling(1),
            device,
            batch_tokens=batch_tokens,
            vocabulary=len(self._tokenizer),
            tokenizer=self._tokenizer,
            processor=processor,
        )
        longest = longest_sequence(decoder, batch_tokens)
        self.limits = Limits(decoder.vocabulary_rows, longest, longest, 1, image_bytes=self._images.most_bytes)
        self.info = model_info(options.name, decoder, self._tokenizer) | {
            "generates": True,
            "version": FIRST_VERSION,
            "max_tokens": longest,
            **self._images.info,
        }
        fingerprint, dtype = model_fingerprint(source), self.info["dtype"]
        base = AdapterBase(fingerprint=fingerprint, dtype=dtype, quantize=options.quantize)
        self._updates = WeightUpdates(decoder, base, weights_root)
        self.description = [
            f"model {self.name}: vocabulary of {self.limits.vocabulary:,} rows, {options.quantize or dtype} on "
            f"{device.type}; completions of at most {longest:,} tokens with their prompt",
            *self._images.description,
        ]

    def add_routes(self, application: Application) -> None:
        lock = asyncio.Lock()

        def generate(content: bytes, kind: str) -> Parsed:
            """Generate a completion: token ids, log-probabilities and the version of the weights, in vLLM's format.

            A request for a prompt with images has a safetensors body (see stillhouse/serving/wire.py).
            """
            sent: ReceivedImages = None, {}
            try:
                if kind == SAFETENSORS:
                    content, sent = decode_prompt(content)
                body = parse_json(content, GenerateBody)
                [images] = decode_images(*sent, [np.array(body.token_ids, dtype=np.int32)])
            except ValueError as error:
                raise refused(str(error), "images") from error
            application.require_model(body.model)
            part = generation_part(body, self.limits, self.info["eos_token_ids"], images)
            return [part], partial(generation_answer, body, self.name)

        def result_bytes(results: Sequence[VersionedCompletion]) -> int:
            return sum(_TOKEN_BYTES * len(result.completion.ids_N) for result in results)

        schemas = {JSON: GenerateBody.model_json_schema(), SAFETENSORS: BINARY}
        application.add_operation("/inference/v1/generate", generate, schemas, result_bytes)

        @application.api.post(
            "/v1/weights",
            response_class=JSONResponse,
            responses=errors(400, 408, 413, 415, 429, 500, 503),
            openapi_extra=required_body({JSON: WeightsBody.model_json_schema()}),
        )
        async def weights(request: Request) -> Response:
            """Load published weights from a folder for all later batches. The answer is sent when they are in use."""
            async with application.read_body(request, {JSON: _WEIGHTS_BYTES}) as (content, _):
                body = parse_json(content, WeightsBody)
            if application.queue.is_draining:
                raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, ENDING)
            if lock.locked():
                raise busy("other weights are being loaded: try again")
            async with lock:
                try:
                    read = await run_in_threadpool(self._updates.read, Path(body.folder), body.manifest)
                except ValueError as error:
                    raise refused(str(error), "folder") from error
                await asyncio.wrap_future(self._updates.submit(read, body.version))
            self.info["version"] = body.version
            return JSONResponse({"version": body.version})

    def check(self, parts: Sequence[GenerationPart]) -> None:
        self._images.check([(part.request.prompt_ids, part.images) for part in parts], "images")
        if any(part.request.prompt_ids[-1] in self._images.placeholder_ids for part in parts):
            raise refused("the prompt ends with an image: expected text after the image", "images")

    def compute(self, parts: Sequence[GenerationPart]) -> list[VersionedCompletion | NotFiniteError]:
        requests = [part.request for part in parts]
        self._generator.check(requests)
        outcomes: dict[int, VersionedCompletion | NotFiniteError] = {}
        for members in self._generator.batches(requests):  # all members have the same sampling
            try:
                completions = self._generator.batch([requests[number] for number in members], 0)
            except NotFiniteError as error:
                outcomes |= dict.fromkeys(members, error)
                continue
            for number, completion in zip(members, completions, strict=True):
                sampling, stop, ids = requests[number].sampling, None, completion.ids_N.tolist()
                assert sampling is not None
                if completion.finish == "stop" and ids[-1] not in sampling.eos_ids:
                    [stop] = stop_texts([ids], sampling.stop, self._tokenizer)
                outcomes[number] = VersionedCompletion(completion, self._updates.version, stop)
        return [outcomes[number] for number in range(len(parts))]

    def between_batches(self) -> None:
        self._updates.apply()

    def end(self) -> None:
        self._updates.close()


class WeightsBody(StrictBody):
    """A request to load new weights.

    folder: a folder of published weights on the server's machine (see `published_folder.py`). version: the label of
    completions with these weights. manifest: the sha256 of the manifest.json that the run has written; null accepts
    any manifest.
    """

    folder: str = Field(min_length=1, max_length=4096)
    version: str = Field(pattern=r"^[!-~]{1,128}$")
    manifest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class SamplingBody(StrictBody):
    """The sampling of a completion. Fields with one allowed value exist for clients that always send them."""

    n: Literal[1] = 1
    max_tokens: int = Field(default=16, ge=1, description="the maximum number of tokens, including an end token")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0: the most probable token")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31, description="0 or -1: all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: a random seed")
    stop: StopText | FirstWrong[StopText] | None = Field(
        default=None, description="at most 16 texts; the text that ends the completion stays in it"
    )
    stop_token_ids: FirstWrong[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool = Field(default=False, description="whether to go on after the model's end tokens")
    logprobs: Literal[0, 1] | None = Field(default=None, description="0 or 1: the log-probability of each token")
    prompt_logprobs: None = None
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    detokenize: bool = Field(default=False, description="no effect: the answer has only token ids")
    skip_special_tokens: bool = Field(default=True, description="no effect: the answer has only token ids")
    include_stop_str_in_output: bool = Field(default=True, description="no effect: the answer has all token ids")


class GenerateBody(StrictBody):
    token_ids: FirstWrong[TokenId] = Field(min_length=1, description="the prompt")
    sampling_params: SamplingBody
    model: str | None = Field(default=None, description="the name of this server's model, or null")
    request_id: str | None = Field(default=None, max_length=256)
    return_token_ids: bool = Field(default=False, description="whether the answer repeats the prompt")
    output_mode: Literal["tokens"] = "tokens"
    stream: Literal[False] = False


def generation_part(
    body: GenerateBody, limits: Limits, eos_ids: Sequence[int], images: DocumentMedia | None = None
) -> GenerationPart:
    """Make the only part of a request; raise RequestError if it exceeds a limit. eos_ids: the model's end tokens."""
    options = body.sampling_params
    limits.check_documents([body.token_ids], "token_ids")
    tokens = len(body.token_ids) + options.max_tokens
    if tokens > limits.max_tokens:
        raise refused(
            f"{len(body.token_ids)} tokens of the prompt and max_tokens={options.max_tokens}: expected at most "
            f"{limits.max_tokens} together (the smaller of the model's number of positions and the server's "
            "--batch-tokens)",
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
    request = GenerationRequest(0, prompt, seed, options.max_tokens, media_tensors=tensors, sampling=sampling)
    return GenerationPart(request, tokens, images)


def generation_answer(body: GenerateBody, model: str, results: Sequence[VersionedCompletion]) -> bytes:
    [result] = results
    completion, options = result.completion, body.sampling_params
    ids, log_probs = completion.ids_N.tolist(), completion.log_probs_N.tolist()
    stop_reason: str | int | None = result.stop
    if completion.finish == "stop" and ids[-1] in (options.stop_token_ids or ()):
        stop_reason = ids[-1]
    entries = [  # the rank is null, because it is not computed
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
    return bytes(JSONResponse(content).body)
