"""A stock vLLM (0.30 or later): completions from `/inference/v1/generate`, weights by its routes for development.

The server is started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1. It marks each token with the label of the
weights that wrote it. At a temperature other than 1 it also needs --logprobs-mode processed_logprobs.

Of a student with an adapter, each version is an adapter of its own name, which requests name as their model; the
server needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. A completion that is under way keeps its adapter.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import httpx2
from pydantic import BaseModel, Field, ValidationError
from transformers import PreTrainedTokenizerBase

from stillhouse.generation.sample import Sampling
from stillhouse.serving.engines.api import (
    Answer,
    Ask,
    Kind,
    Published,
    Span,
    refuse,
    require,
)

_DEVELOPMENT = "expected a vLLM that was started with VLLM_SERVER_DEV_MODE=1 in its environment"
_LORA = (
    "expected a vLLM that was started with --enable-lora, --max-lora-rank of at least the adapter's r, and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
)


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _LogProb(BaseModel):
    token_id: int
    logprob: float


class _Token(_LogProb):
    top_logprobs: list[_LogProb] = []


class _LogProbs(BaseModel):
    content: list[_Token]


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[int]
    logprobs: _LogProbs
    weight_versions: list[_Span] | None = None


class _Device(BaseModel):
    device: str


class _VllmConfig(BaseModel):
    device_config: _Device


class _ServerInfo(BaseModel):
    vllm_config: _VllmConfig


class _Generated(BaseModel):
    model: str | None = None
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Tokenized(BaseModel):
    tokens: list[int]


class VllmApi:
    """is_tied: whether the student's output head is its embedding, and whole models are given to the server."""

    name: ClassVar[str] = "vllm"
    path: ClassVar[str] = "/inference/v1/generate"
    marks_tokens: ClassVar[bool] = True
    proved: ClassVar[bool] = False
    hint: ClassVar[str] = "expected vLLM 0.30 or later, started with --enable-scale-out"

    def __init__(self, *, is_tied: bool = False):
        self.is_tied = is_tied

    def model_name(self, ask: Ask) -> str | None:
        try:
            name = _Models.model_validate_json(ask("/v1/models", None).content).data[0].id
        except ValidationError as error:
            raise ValueError(f"/v1/models names no model: {error.errors()[0]['msg']}; {self.hint}") from error
        if self.is_tied:
            _require_whole_updates(ask)
        return name

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        parameters = {
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,  # 0 is all tokens here, too
            "min_p": sampling.min_p,
            "seed": seed % 2**63,
            # the drawn token counts among them, whether or not it is one of the likeliest
            "logprobs": top + 1 if top else 0,
            # a completion ends at the given tokens, and at no other that the server's own configuration names
            "ignore_eos": True,
            "stop_token_ids": list(sampling.eos_ids),
            "stop": list(sampling.stop),
            "detokenize": bool(sampling.stop),
        }
        named = {} if model is None else {"model": model}
        return {**named, "token_ids": list(ids), "sampling_params": parameters}

    def parse(self, response: httpx2.Response, kind: Kind) -> Answer:
        found = _read(response)
        [choice] = found.choices
        tokens = choice.logprobs.content
        if [each.token_id for each in tokens] != choice.token_ids:
            raise ValueError("the ids of the completion and of its log-probabilities differ")
        spans = [Span(each.version, each.start, each.end) for each in choice.weight_versions or []]
        if kind == "adapter":  # its label is the model that the request names; the label of the weights is the base's
            spans = [Span(found.model, 0, len(tokens))]
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        return Answer(choice.token_ids, [each.logprob for each in tokens], spans, choice.finish_reason, stop)

    def top_log_probs(self, response: httpx2.Response) -> list[float]:
        [choice] = _read(response).choices
        found = {each.token_id: each.logprob for token in choice.logprobs.content[:1] for each in token.top_logprobs}
        return sorted(found.values(), reverse=True)

    def give(self, ask: Ask, published: Published) -> bool:
        if published.kind == "adapter":
            answer = ask("/v1/load_lora_adapter", {"lora_name": published.label, "lora_path": str(published.folder)})
            if answer.status_code != 200 and "already been loaded" not in answer.text:
                require(answer, "loading the adapter", _LORA)
            return True
        # Requests under way wait; what half-updated weights would write has a label that nobody accepts.
        _succeed(ask, "/pause?mode=keep", {}, "status", "paused")
        _succeed(ask, "/update_weight_version", {"new_version": f"{published.label}-loading"}, "success", True)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(published.folder)}}
        require(ask("/collective_rpc", reload), "loading the weights", "the server stays paused")
        # The keys and values that the old weights have computed for requests under way are computed again.
        _succeed(ask, "/reset_prefix_cache?reset_running_requests=true", {}, "success", True)
        _succeed(ask, "/update_weight_version", {"new_version": published.label}, "success", True)
        # A server that was started anew after it had loaded the weights has its first ones, and is not paused.
        is_paused = require(ask("/is_paused", None), "/is_paused") == {"is_paused": True}
        if is_paused:
            _succeed(ask, "/resume", {}, "status", "resumed")
        return is_paused

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        response = ask("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        if response.status_code != 200:
            raise ValueError(
                f"{response.url} does not tell the server's tokenizer: {response.status_code}; expected a vLLM that "
                "was started without --skip-tokenizer-init"
            )
        try:
            found = _Tokenized.model_validate_json(response.content).tokens
        except ValidationError as error:
            raise ValueError(f"{response.url} gives no ids: {error.errors()[0]['msg']}") from error
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        return None if found == expected else f"it makes {len(found)} ids of a text of {len(expected)}"

    def forget(self, ask: Ask, label: str, kind: Kind) -> None:
        if kind == "adapter":
            ask("/v1/unload_lora_adapter", {"lora_name": label})


def _require_whole_updates(ask: Ask) -> None:
    """Raise ValueError for a vLLM on a CPU. It copies a tied head into a form of its own when it starts, and loading
    new weights changes the embedding alone, so that its log-probabilities belong to no version.
    """
    answer = ask("/server_info?config_format=json", None)
    if answer.status_code == 404:
        raise ValueError(f"{answer.url}: 404; {_DEVELOPMENT}")
    try:
        device = _ServerInfo.model_validate_json(answer.content).vllm_config.device_config.device
    except ValidationError as error:
        raise ValueError(
            f"{answer.url} does not tell the server's device ({error.errors()[0]['msg']}), and a vLLM on a CPU keeps "
            "the first output head of a student whose head is its embedding: expected a vLLM whose "
            "/server_info has vllm_config.device_config.device"
        ) from error
    if device == "cpu":
        raise ValueError(
            f"{str(answer.url).partition('/server_info')[0]} is a vLLM on a CPU. When it is given new weights, it "
            "keeps the first output head of a student whose head is its embedding (tie_word_embeddings): expected a "
            "vLLM on a GPU, a student with a head of its own, or rollout.engine transformers or stillhouse"
        )


def _succeed(ask: Ask, path: str, body: Any, key: str, expected: Any) -> None:
    response = ask(path, body)
    found = require(response, path, _DEVELOPMENT if response.status_code == 404 else "")
    if not isinstance(found, dict) or found.get(key) != expected:
        refuse(response, path, f"got {str(found)[:200]}, expected {key}: {expected}")


def _read(response: httpx2.Response) -> _Generated:
    try:
        return _Generated.model_validate_json(response.content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"/inference/v1/generate gives no completion: {place}: {first['msg']}") from error
