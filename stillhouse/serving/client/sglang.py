"""The client of SGLang (0.5), which requests signals and completions from `/generate`. The client follows SGLang's
source code. The tests use no recorded answers of a real server.

An answer has one label: that of the weights at the end of the completion. So an update of the weights first aborts
the completions in progress, and answers to requests that were sent before the update are discarded. If a version is
an adapter, requests name the adapter, but answers do not. So the label of the base weights is set to a label of this
engine; a restarted server no longer has this label. A server must be started with --enable-return-hidden-states for
hidden states, and with --enable-lora, --max-lora-rank and --lora-target-modules for adapters.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field

from stillhouse.libraries import reading
from stillhouse.rollout.records import Sampling
from stillhouse.serving.client.http_client import HttpAnswer, LogProb, bytes_of_json, parsed
from stillhouse.serving.client.pool import Ask, ServerRequest
from stillhouse.serving.client.server_api import (
    Answer,
    Published,
    Scores,
    ServerApi,
    ServerInfo,
    VersionSpan,
    ask_description,
    json_call,
    require,
    top_k_tensors,
)
from stillhouse.serving.wire import TokenId
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

_LORA = (
    "expected an SGLang that was started with --enable-lora, --max-lora-rank of at least the adapter's r, and "
    "--lora-target-modules all or those of the adapter"
)

#: an entry has a log-probability, an id and a text
_PromptEntry = tuple[LogProb | None, TokenId, Any]
_Entry = tuple[LogProb, TokenId, str | None]


class _ModelInfo(BaseModel):
    model_path: str


class _ScoredMeta(BaseModel):
    input_token_logprobs: list[_PromptEntry] | None = None
    input_top_logprobs: list[list[_PromptEntry] | None] | None = None
    hidden_states: Annotated[list[Any], Field(min_length=1)] | None = None


class _Scored(BaseModel):
    meta_info: _ScoredMeta


class _Finish(BaseModel):
    type: Literal["stop", "length"]
    matched: int | str | None = None


class _GeneratedMeta(BaseModel):
    finish_reason: _Finish
    output_token_logprobs: list[_Entry]
    output_top_logprobs: list[list[_Entry] | None] = []
    weight_version: str | None = None


class _Generated(BaseModel):
    output_ids: list[int] | None = None
    meta_info: _GeneratedMeta


class SglangApi(ServerApi):
    name = "sglang"
    path = "/generate"
    marks_tokens = False
    unknown_adapter = 400
    adapter_routes = ""

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        return ServerInfo(url, ask_description(_ModelInfo, ask, "/get_model_info", self.kind.title).model_path)

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> list[ServerRequest[Scores]]:
        return [_scoring(spec, width, document) for document in documents]

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        parameters = {
            "max_new_tokens": max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "sampling_seed": seed % 2**31,
            "ignore_eos": True,
            "stop_token_ids": list(sampling.eos_ids),
            "stop": list(sampling.stop),
            "no_stop_trim": True,
        }
        named = {} if model is None else {"lora_path": model}
        return {
            **named,
            "input_ids": list(ids),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": top,
        }

    def parse(self, response: HttpAnswer, adapter: str | None = None) -> Answer:
        generated = _generated(response)
        meta = generated.meta_info
        ids = [token for _, token, _ in meta.output_token_logprobs]
        log_probs = [log_prob for log_prob, _, _ in meta.output_token_logprobs]
        if generated.output_ids is not None and generated.output_ids != ids:
            raise ValueError("the ids of the completion and of its log-probabilities differ")
        stop = meta.finish_reason.matched if isinstance(meta.finish_reason.matched, str) else None
        label = meta.weight_version
        if adapter is not None:
            label = adapter if label == adapter.rsplit("-", 2)[0] else None
        return Answer(ids, log_probs, [VersionSpan(label, 0, len(ids))], meta.finish_reason.type, stop)

    def lacks_adapter(self, response: HttpAnswer) -> bool:
        return super().lacks_adapter(response) and "LoRA adapter" in response.text

    def top_log_probs(self, response: HttpAnswer) -> list[float]:
        rows = _generated(response).meta_info.output_top_logprobs
        first = (rows[0] if rows else None) or []
        return sorted({token: log_prob for log_prob, token, _ in first}.values(), reverse=True)

    def load_weights(self, ask: Ask, published: Published) -> bool:
        if published.kind == "adapter":
            self.load_adapter(ask, published, "already loaded", _LORA)
            # the prefix that the labels of all versions of an engine have in common
            label = {"new_version": published.label.rsplit("-", 2)[0], "abort_all_requests": False}
            require(ask("/update_weight_version", label), "/update_weight_version", self.kind.hint)
            return True
        require(ask("/pause_generation", {"mode": "abort"}), "/pause_generation", self.kind.hint)
        body = {"model_path": str(published.folder), "weight_version": published.label, "flush_cache": True}
        response = ask("/update_weights_from_disk", body)
        require(response, "loading the weights", "the server stays paused", {"success": True})
        require(ask("/continue_generation", {}), "/continue_generation")
        return True


def _scoring(spec: SignalSpec, width: int, document: DocumentRows) -> ServerRequest[Scores]:
    tokens: list[int] = document.tokens[: document.rows.stop + 1].tolist()
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": {"temperature": 1.0, "max_new_tokens": 0}}

    def hidden_states(response: HttpAnswer) -> Scores:
        states = _scored(response).hidden_states
        with reading("the hidden states of /generate are not an array of numbers"):
            hidden_SE = torch.tensor(states[0] if states else [], dtype=torch.float32)
        expected = [len(tokens), width]
        if list(hidden_SE.shape) != expected:
            raise ValueError(f"/generate gives hidden states of shape {list(hidden_SE.shape)}: expected {expected}")
        return [{"hidden": hidden_SE[document.rows.start : document.rows.stop].to(DTYPES[spec.dtype])}]

    def top_k(response: HttpAnswer) -> Scores:
        meta = _scored(response)
        actual = meta.input_token_logprobs or []
        if [token for _, token, _ in actual] != tokens:
            raise ValueError(f"/generate scored {len(actual)} tokens, which are not the {len(tokens)} of the request")
        entries = [
            {token: log_prob for log_prob, token, _ in [scored, *(row or [])] if log_prob is not None}
            for scored, row in zip(actual, meta.input_top_logprobs or [], strict=False)
        ]
        return [top_k_tensors(entries, document, spec, "/generate")]

    if spec.kind == "hidden":
        body |= {"return_hidden_states": True}
        return json_call("/generate", body, hidden_states, len(tokens), bytes_of_json(len(tokens) * width, 32))
    body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": spec.top_k}
    return json_call("/generate", body, top_k, len(tokens), bytes_of_json(len(tokens) * (spec.entries + 1)))


def _scored(response: HttpAnswer) -> _ScoredMeta:
    return parsed(_Scored, response.content, "the answer of /generate does not have the requested scores").meta_info


def _generated(response: HttpAnswer) -> _Generated:
    return parsed(_Generated, response.content, "/generate gives no completion")
