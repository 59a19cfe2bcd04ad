"""The client of a stock vLLM (0.30 or later), for signals and for completions.

If a server is started for pooling, it gives hidden states after the last norm. If it is started for completions, it
gives log-probabilities at temperature 1. The signal "chosen" needs vLLM 0.31 on a GPU, started with
--enable-scale-out; the client for this signal follows vLLM's source code, and its tests have no recorded answers.
Loading new weights needs VLLM_SERVER_DEV_MODE=1. Temperatures other than 1 need --logprobs-mode processed_logprobs.
Each token of an answer has the label of the weights that generated it. If the weights are an adapter, their label is
the name of the model in requests. Adapters need --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.
"""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import AliasPath, BaseModel, Field
from transformers import PreTrainedTokenizerBase

from stillhouse.libraries import reading
from stillhouse.rollout.records import Sampling
from stillhouse.serving.client.http_client import HttpAnswer, LogProb, Size, bytes_of_json, parsed
from stillhouse.serving.client.pool import Ask, ServerRequest
from stillhouse.serving.client.server_api import (
    Answer,
    Published,
    Scores,
    ServerApi,
    ServerInfo,
    UnknownTokenizerError,
    VersionSpan,
    ask_description,
    id_tensors,
    json_call,
    next_tokens,
    require,
    top_k_tensors,
)
from stillhouse.serving.wire import TokenId
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

_GENERATE = "/inference/v1/generate"
_NO_POOLING = (
    "this vLLM generates text; expected a vLLM with the options --runner pooling --convert embed --pooler-config "
    """'{"task":"token_embed","use_activation":false}'"""
)
_NO_SCORES = "this vLLM scores no chosen ids; expected vLLM 0.31 or later, started with --enable-scale-out"
_NO_COMPLETIONS = "this vLLM was started for pooling; expected a vLLM that generates text, or the signal hidden"
_DEVELOPMENT = "expected a vLLM that was started with VLLM_SERVER_DEV_MODE=1 in its environment"
_LORA = (
    "expected a vLLM that was started with --enable-lora, --max-lora-rank of at least the adapter's r, and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
)


class _FirstModel(BaseModel):
    id: str = Field(validation_alias=AliasPath("data", 0, "id"))
    max_model_len: Size | None = Field(default=None, validation_alias=AliasPath("data", 0, "max_model_len"))


class _Tokenized(BaseModel):
    tokens: list[int]


class _Pooled(BaseModel):
    embed_dtype: str
    endianness: str
    shape: list[int]


class _Pooling(BaseModel):
    data: tuple[_Pooled]


class _LogProb(BaseModel):
    logprob: LogProb


class _PromptChoice(BaseModel):
    prompt_logprobs: list[dict[TokenId, _LogProb] | None]


class _Completion(BaseModel):
    choices: tuple[_PromptChoice]


class _ChosenScores(BaseModel):
    prompt_token_id_logprobs: str


class _TopToken(_LogProb):
    token_id: TokenId


class _Token(_TopToken):
    top_logprobs: list[_TopToken] = []


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    token_ids: list[TokenId]
    tokens: list[_Token] = Field(validation_alias=AliasPath("logprobs", "content"))
    weight_versions: list[_Span] | None = None


class _Generated(BaseModel):
    model: str | None = None
    choices: tuple[_Choice]


class _ServerInfo(BaseModel):
    device: str = Field(validation_alias=AliasPath("vllm_config", "device_config", "device"))


class VllmApi(ServerApi):
    name = "vllm"
    path = _GENERATE

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        model = ask_description(_FirstModel, ask, "/v1/models", self.kind.title)
        return ServerInfo(url, model.id, max_tokens=model.max_model_len)

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> Iterable[ServerRequest[Scores]]:
        make = {"hidden": _pooling, "top_k": _prompt_log_probs, "chosen": _chosen_scores}[spec.kind]
        return [make(info, spec, width, document) for document in documents]

    def model_name(self, ask: Ask) -> str | None:
        answer = ask("/v1/models", None)
        model = parsed(_FirstModel, answer.content, f"{answer.url} names no model", self.kind.hint)
        if self.is_tied:
            # A vLLM on a CPU copies a tied head when it starts. New weights would change the embedding but not this
            # copy, so that the log-probabilities would belong to no version.
            answer = ask("/server_info?config_format=json", None)
            if answer.status == 404:
                raise ValueError(f"{answer.url}: 404; {_DEVELOPMENT}")
            what = (
                f"{answer.url} does not report the server's device, and a vLLM on a CPU does not update an output "
                "head that is tied to the embedding: expected a vLLM whose /server_info has "
                "vllm_config.device_config.device"
            )
            if parsed(_ServerInfo, answer.content, what).device == "cpu":
                raise ValueError(
                    f"{answer.server} is a vLLM on a CPU, which does not update an output head that is tied to the "
                    "embedding (tie_word_embeddings) when it loads new weights: expected a vLLM on a GPU, a student "
                    "with an untied head, or rollout.engine transformers or stillhouse"
                )
        return model.id

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        parameters = {
            "n": 1,
            "max_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,  # 0 means all tokens in vLLM, too
            "min_p": sampling.min_p,
            "seed": seed % 2**63,
            # one more than `top`, because the sampled token also counts
            "logprobs": top + 1 if top else 0,
            # a completion ends at these tokens, not at the end tokens of the server's configuration
            "ignore_eos": True,
            "stop_token_ids": list(sampling.eos_ids),
            "stop": list(sampling.stop),
            "detokenize": bool(sampling.stop),
        }
        named = {} if model is None else {"model": model}
        return {**named, "token_ids": list(ids), "sampling_params": parameters}

    def parse(self, response: HttpAnswer, adapter: str | None = None) -> Answer:
        generated = _generated(response)
        [choice] = generated.choices
        tokens = choice.tokens
        if [token.token_id for token in tokens] != choice.token_ids:
            raise ValueError("the ids of the completion and of its log-probabilities differ")
        spans = [VersionSpan(span.version, span.start, span.end) for span in choice.weight_versions or []]
        if adapter is not None:  # the label is the model's name, because `weight_versions` names the base weights
            spans = [VersionSpan(generated.model, 0, len(tokens))]
        stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        return Answer(choice.token_ids, [token.logprob for token in tokens], spans, choice.finish_reason, stop)

    def top_log_probs(self, response: HttpAnswer) -> list[float]:
        [choice] = _generated(response).choices
        by_id = {top.token_id: top.logprob for token in choice.tokens[:1] for top in token.top_logprobs}
        return sorted(by_id.values(), reverse=True)

    def load_weights(self, ask: Ask, published: Published) -> bool:
        if published.kind == "adapter":
            self.load_adapter(ask, published, "already been loaded", _LORA)
            return True
        # Requests in progress wait. If a token were generated during the update, the client would refuse its label.
        _succeed(ask, "/pause?mode=keep", {}, "status", "paused")
        _succeed(ask, "/update_weight_version", {"new_version": f"{published.label}-loading"}, "success", True)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(published.folder)}}
        require(ask("/collective_rpc", reload), "loading the weights", "the server stays paused")
        # Discard the KV cache of the old weights. vLLM computes it again for the requests in progress.
        _succeed(ask, "/reset_prefix_cache?reset_running_requests=true", {}, "success", True)
        _succeed(ask, "/update_weight_version", {"new_version": published.label}, "success", True)
        # A server that was restarted after loading the weights has its initial weights, and is not paused.
        is_paused = require(ask("/is_paused", None), "/is_paused") == {"is_paused": True}
        if is_paused:
            _succeed(ask, "/resume", {}, "status", "resumed")
        return is_paused

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        response = ask("/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
        if response.status != 200:
            raise UnknownTokenizerError(
                f"{response.url} does not report the server's tokenizer: {response.status}; expected a vLLM that "
                "was started without --skip-tokenizer-init"
            )
        ids = parsed(_Tokenized, response.content, f"{response.url} gives no ids").tokens
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids == expected:
            return None
        differing = (at for at, pair in enumerate(zip(ids, expected, strict=False)) if pair[0] != pair[1])
        at = next(differing, min(len(ids), len(expected)))
        return f"it makes {len(ids)} ids of a text that has {len(expected)} ids; they differ from id {at} on"


def _pooling(info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows) -> ServerRequest[Scores]:
    # the model is causal, so tokens after the last requested row do not change the requested rows
    tokens = document.tokens[: document.rows.stop].tolist()
    body = {
        "model": info.model,
        "input": tokens,
        "task": "token_embed",
        "use_activation": False,
        "encoding_format": "bytes",
        "embed_dtype": spec.dtype,
        "endianness": "little",
    }
    expected, dtype = [len(tokens), width], DTYPES[spec.dtype]

    def parse(response: HttpAnswer) -> Scores:
        what = "the header 'metadata' of /pooling does not describe one array"
        pooled = parsed(_Pooling, response.headers.get("metadata", ""), what).data[0]
        if pooled.shape != expected or pooled.embed_dtype != spec.dtype or pooled.endianness != "little":
            raise ValueError(f"/pooling gives {pooled}: expected {expected} of {spec.dtype}, little endian")
        if len(response.content) != math.prod(expected) * dtype.itemsize:
            raise ValueError(f"/pooling gives {len(response.content):,} bytes for {expected} of {spec.dtype}")
        hidden_SE = torch.frombuffer(bytearray(response.content), dtype=dtype).view(expected)
        return [{"hidden": hidden_SE[document.rows.start :]}]

    most_bytes = bytes_of_json(math.prod(expected), dtype.itemsize)
    return json_call("/pooling", body, parse, len(tokens), most_bytes, _NO_POOLING)


def _prompt_log_probs(
    info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows
) -> ServerRequest[Scores]:
    tokens = document.tokens[: document.rows.stop + 1].tolist()
    body = {
        "model": info.model,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": spec.top_k,
        "return_tokens_as_token_ids": True,
    }

    def parse(response: HttpAnswer) -> Scores:
        what = "/v1/completions has no prompt_logprobs of one prompt"
        rows = parsed(_Completion, response.content, what).choices[0].prompt_logprobs
        entries = [{token: entry.logprob for token, entry in (row or {}).items()} for row in rows]
        return [top_k_tensors(entries, document, spec, "/v1/completions")]

    most_bytes = bytes_of_json(len(tokens) * (spec.entries + 1))
    return json_call("/v1/completions", body, parse, len(tokens), most_bytes, _NO_COMPLETIONS)


def _chosen_scores(info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows) -> ServerRequest[Scores]:
    ids_NK = document.ids_NK
    assert ids_NK is not None
    tokens = document.tokens[: document.rows.stop + 1].tolist()
    next_tokens(document)  # raises ValueError for the document's last row, which this route does not score
    scored = {"prompt_logprob_start": document.rows.start, "prompt_logprob_token_ids": ids_NK.tolist()}
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "temperature": 0.0, **scored}}

    def parse(response: HttpAnswer) -> Scores:
        what = f"{_GENERATE} gives no array of log-probabilities"
        encoded = parsed(_ChosenScores, response.content, what).prompt_token_id_logprobs
        with reading(what):  # np.load would also read other formats, such as archives
            log_probs_NK = np.lib.format.read_array(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        if log_probs_NK.shape != tuple(ids_NK.shape) or log_probs_NK.dtype.kind != "f":
            raise ValueError(
                f"{_GENERATE} gives {log_probs_NK.dtype} of shape {log_probs_NK.shape}: expected one number for each "
                f"of {tuple(ids_NK.shape)} ids"
            )
        return [id_tensors(ids_NK.to(torch.int32).numpy(), log_probs_NK, spec)]

    return json_call(_GENERATE, body, parse, len(tokens), bytes_of_json(ids_NK.numel(), 32), _NO_SCORES)


def _generated(response: HttpAnswer) -> _Generated:
    return parsed(_Generated, response.content, f"{_GENERATE} gives no completion")


def _succeed(ask: Ask, path: str, body: Any, key: str, value: str | bool) -> None:
    response = ask(path, body)
    require(response, path, _DEVELOPMENT if response.status == 404 else "", {key: value})
