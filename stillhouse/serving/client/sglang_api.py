"""SGLang (0.5): `/generate` without new tokens. Its answers are written after its source; none was recorded.

Hidden states are JSON lists, and need a server that was started with `--enable-return-hidden-states`.
The log-probabilities are always at temperature 1, over the whole vocabulary.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import httpx2
import torch
from pydantic import BaseModel, Field, ValidationError

from stillhouse.serving.client.api import (
    NumberedCall,
    Scores,
    ServerInfo,
    next_tokens,
    sparse_scores,
)
from stillhouse.serving.client.pool import Call, ServerPool
from stillhouse.serving.wire import JSON
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

#: log-probability, id, text
_Entry = tuple[float | None, int, Any]


class _ModelInfo(BaseModel):
    model_path: str


class _Meta(BaseModel):
    input_token_logprobs: list[_Entry] | None = None
    input_top_logprobs: list[list[_Entry] | None] | None = None
    hidden_states: Annotated[list[Any], Field(min_length=1)] | None = None


class _Generated(BaseModel):
    meta_info: _Meta


class SglangApi:
    name: ClassVar[str] = "sglang"
    signals: ClassVar[frozenset[str]] = frozenset({"hidden", "top_k"})
    any_temperature: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def recognises(self, pool: ServerPool, url: str) -> bool:
        answer = pool.ask(url, "/get_model_info")
        return answer.status_code == 200 and '"model_path"' in answer.text

    def describe(self, pool: ServerPool, url: str) -> ServerInfo:
        answer = pool.ask(url, "/get_model_info")
        try:
            return ServerInfo(url, _ModelInfo.model_validate_json(answer.content).model_path)
        except ValidationError as error:
            raise ValueError(f"{url}/get_model_info is not that of SGLang: {error}") from error

    def tokenize(self, pool: ServerPool, server: ServerInfo, text: str) -> list[int] | None:
        return None

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, wanted: Sequence[DocumentRows]
    ) -> list[NumberedCall]:
        return [([number], _call(spec, width, each)) for number, each in enumerate(wanted)]


def _call(spec: SignalSpec, width: int, document: DocumentRows) -> Call[Scores]:
    tokens = document.tokens[: document.rows.stop + 1].tolist()
    body: dict[str, Any] = {"input_ids": tokens, "sampling_params": {"temperature": 1.0, "max_new_tokens": 0}}
    if spec.kind == "hidden":
        body["return_hidden_states"] = True
        parse = partial(_hidden_states, spec=spec, width=width, document=document, tokens=len(tokens))
    else:
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": spec.top_k}
        parse = partial(_likeliest, spec=spec, document=document, tokens=len(tokens))
    return Call("/generate", json.dumps(body).encode(), JSON, parse, len(tokens))


def _hidden_states(
    response: httpx2.Response, spec: SignalSpec, width: int, document: DocumentRows, tokens: int
) -> Scores:
    found = _meta(response).hidden_states
    try:
        hidden_SE = torch.tensor(found[0] if found else [], dtype=torch.float32)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the hidden states of /generate are no array: {error}") from error
    if list(hidden_SE.shape) != [tokens, width]:
        raise ValueError(
            f"/generate gives hidden states of shape {list(hidden_SE.shape)}: expected {[tokens, width]}"
        )
    if not hidden_SE.isfinite().all():
        raise ValueError("the hidden states of /generate are not finite")
    return [{"hidden": hidden_SE[document.rows.start : document.rows.stop].to(DTYPES[spec.dtype])}]


def _likeliest(response: httpx2.Response, spec: SignalSpec, document: DocumentRows, tokens: int) -> Scores:
    meta = _meta(response)
    actual, best = meta.input_token_logprobs or [], meta.input_top_logprobs or []
    if (len(actual), len(best)) != (tokens, tokens):
        raise ValueError(f"/generate scored {len(actual)} and {len(best)} tokens: expected {tokens}")
    pairs: list[dict[int, float]] = []
    for row, token in zip(document.rows, next_tokens(document), strict=True):
        # entry t + 1 is about token t + 1: it is the distribution of row t
        if actual[row + 1][1] != token:
            raise ValueError(f"row {row} is about token {actual[row + 1][1]}: expected {token}, which follows it")
        found = {each: value for value, each, _ in best[row + 1] or [] if value is not None}
        pairs.append(found)
    return [sparse_scores(pairs, spec)]


def _meta(response: httpx2.Response) -> _Meta:
    try:
        return _Generated.model_validate_json(response.content).meta_info
    except ValidationError as error:
        raise ValueError(f"/generate has no such scores: {error}") from error
