"""`POST /inference/v1/generate`: token ids in and out, in the form of vLLM.

One request is one prompt and one completion. Log-probabilities are those of the draws' temperature, over the whole
vocabulary (`--logprobs-mode processed_logprobs` of vLLM, but before top_p, top_k and min_p). A field that this server
does not support, or does not know, is refused.
"""

import secrets
import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.generation.sample import Completion, GenerationRequest, Sampling
from stillhouse.serving.server.errors import RequestError
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.wire import FirstWrong

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
#: temperatures below, except 0, overflow; vLLM raises them to this one
LOWEST_TEMPERATURE = 0.01


class SamplingBody(BaseModel):
    """How the tokens are drawn. Fields with one possible value are there for clients that always send them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    n: Literal[1] = 1
    max_tokens: int = Field(default=16, ge=1, description="tokens of the completion, its end included")
    temperature: float = Field(default=1.0, ge=0, le=100, description="0: the likeliest token")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31, description="0 or -1: all tokens")
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63, description="null: a random one")
    stop: StopText | FirstWrong[StopText] | None = Field(
        default=None, description="at most 16; they stay in the completion"
    )
    stop_token_ids: FirstWrong[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool = Field(default=False, description="end at stop_token_ids alone, not at the model's own ends")
    logprobs: Literal[0, 1] | None = Field(default=None, description="0 or 1: of each token itself")
    prompt_logprobs: None = None
    presence_penalty: float = Field(default=0.0, ge=0, le=0)
    frequency_penalty: float = Field(default=0.0, ge=0, le=0)
    repetition_penalty: float = Field(default=1.0, ge=1, le=1)
    detokenize: bool = Field(default=False, description="no effect: the answer has token ids")
    skip_special_tokens: bool = Field(default=True, description="no effect: the answer has token ids")
    include_stop_str_in_output: bool = Field(default=True, description="no effect: the tokens stay in the answer")


class GenerateBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    token_ids: FirstWrong[TokenId] = Field(min_length=1, description="the prompt")
    sampling_params: SamplingBody
    model: str | None = Field(default=None, description="the name of this server's model, if given")
    request_id: str | None = Field(default=None, max_length=256)
    return_token_ids: bool = Field(default=False, description="whether the answer repeats the prompt")
    output_mode: Literal["tokens"] = "tokens"
    stream: Literal[False] = False


class WeightsBody(BaseModel):
    """folder: of published weights, on this machine (see `generation/weights.py`). version: the name that completions
    have from then on. manifest: the sha256 of the folder's manifest.json, as the run has written it; null: any.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    folder: str = Field(min_length=1, max_length=4096)
    version: str = Field(pattern=r"^[!-~]{1,128}$")
    manifest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True, eq=False)
class GenerationPart:
    """A completion that a request asks for. tokens: the most that it can have, with its prompt."""

    request: GenerationRequest
    sampling: Sampling
    tokens: int


@dataclass(frozen=True, eq=False)
class Written:
    """A completion and the version of all its weights. stop: the stop text that has ended it, if one has."""

    completion: Completion
    version: str
    stop: str | None


def parse(content: bytes, kind: type[BaseModel]) -> Any:
    """Raises RequestError for a body that is not of this kind."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = ".".join(str(each) for each in first["loc"][:2]) or None
        what = "is not supported by this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{param or 'the body'}: {what}", param=param) from error


def part(body: GenerateBody, limits: Limits, eos: tuple[int, ...]) -> GenerationPart:
    """What the model gets. eos: the model's own ends of sequence. Raises RequestError for more than the limits."""
    given = body.sampling_params
    limits.check_documents([body.token_ids], "token_ids")
    tokens = len(body.token_ids) + given.max_tokens
    if tokens > limits.max_tokens:
        raise _refused(
            f"{len(body.token_ids)} tokens of the prompt and max_tokens={given.max_tokens}: expected at most "
            f"{limits.max_tokens} together (the model's positions, and the server's --batch-tokens)",
            "max_tokens",
        )
    if 0 < given.temperature < LOWEST_TEMPERATURE:
        raise _refused(
            f"temperature={given.temperature:g}: expected 0, or at least {LOWEST_TEMPERATURE:g}", "temperature"
        )
    stop = (given.stop,) if isinstance(given.stop, str) else tuple(given.stop or ())
    if len(stop) > 16:
        raise _refused(f"{len(stop)} stop texts: expected at most 16", "stop")
    ends = {*(given.stop_token_ids or ()), *(() if given.ignore_eos else eos)}
    sampling = Sampling(
        max_new_tokens=limits.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
        min_p=given.min_p,
        stop=stop,
        eos_ids=tuple(sorted(ends)),
    )
    seed = secrets.randbits(63) if given.seed is None else given.seed
    request = GenerationRequest(0, np.array(body.token_ids, dtype=np.int32), seed, given.max_tokens)
    return GenerationPart(request, sampling, tokens)


def answer(body: GenerateBody, model: str, written: Written) -> dict[str, Any]:
    ids, log_probs = written.completion.ids_N.tolist(), written.completion.log_probs_N.tolist()
    asked = body.sampling_params
    reason: str | int | None = written.stop
    if written.completion.finish == "stop" and ids[-1] in (asked.stop_token_ids or ()):
        reason = ids[-1]
    entries = [_entry(*each) for each in zip(ids, log_probs, strict=True)]
    choice = {
        "index": 0,
        "finish_reason": written.completion.finish,
        "stop_reason": reason,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": written.version, "start": 0, "end": len(ids)}],
        "logprobs": None if asked.logprobs is None else {"content": entries},
    }
    return {
        "request_id": body.request_id or f"generate-tokens-{uuid.uuid4().hex[:16]}",
        "model": model,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": len(body.token_ids),
            "total_tokens": len(body.token_ids) + len(ids),
            "completion_tokens": len(ids),
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
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


def _entry(token: int, log_prob: float) -> dict[str, Any]:
    # the token's rank is not computed
    return {"token_id": token, "logprob": log_prob, "rank": None, "top_logprobs": []}


def _refused(message: str, param: str) -> RequestError:
    return RequestError(HTTPStatus.BAD_REQUEST, message, param=f"sampling_params.{param}")
