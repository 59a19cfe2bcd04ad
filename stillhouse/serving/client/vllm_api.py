"""A stock vLLM (0.30 or later): hidden states from `/pooling`, the likeliest ids from `/v1/completions`, and ids that
are chosen by the student from `/inference/v1/generate`.

A server is started either for pooling or for completions, so it gives hidden states or ids. Hidden states are those
after the last norm; with the teacher's head, which the client has, they give the exact distribution at every
temperature. Log-probabilities are always at temperature 1, over the whole vocabulary. Chosen ids need vLLM 0.31 on a
GPU, started with --enable-scale-out; that answer was written after its source, none was recorded.
"""

import base64
import io
import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

import httpx2
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stillhouse.libraries import reading
from stillhouse.serving.client.api import (
    NumberedCall,
    Scores,
    ServerInfo,
    next_tokens,
    scores_of_ids,
    sparse_scores,
)
from stillhouse.serving.client.pool import Call, ServerPool
from stillhouse.serving.wire import JSON
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

_NO_POOLING = (
    "this vLLM generates text; expected one that was started with --runner pooling --convert embed --pooler-config "
    """'{"task":"token_embed","use_activation":false}'"""
)
_NO_SCORES = "this vLLM scores no chosen ids; expected 0.31 or later, started with --enable-scale-out"
_NO_COMPLETIONS = "this vLLM pools; expected one that generates text, or the signal hidden"


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Tokenized(BaseModel):
    tokens: list[int]


class _Pooled(BaseModel):
    embed_dtype: str
    endianness: str
    shape: list[int]


class _Pooling(BaseModel):
    data: Annotated[list[_Pooled], Field(min_length=1, max_length=1)]


class _LogProb(BaseModel):
    model_config = ConfigDict(extra="ignore")

    logprob: float


class _Choice(BaseModel):
    prompt_logprobs: list[dict[int, _LogProb] | None]


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


class _Generated(BaseModel):
    prompt_token_id_logprobs: str


class VllmApi:
    name: ClassVar[str] = "vllm"
    signals: ClassVar[frozenset[str]] = frozenset({"hidden", "top_k", "chosen"})
    any_temperature: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def recognises(self, pool: ServerPool, url: str) -> bool:
        answer = pool.ask(url, "/v1/models")
        return answer.status_code == 200 and '"owned_by":"vllm"' in answer.text.replace(" ", "")

    def describe(self, pool: ServerPool, url: str) -> ServerInfo:
        answer = pool.ask(url, "/v1/models")
        if answer.status_code != 200:
            raise ValueError(f"{url}/v1/models answers {answer.status_code}: expected 200, with the right token")
        try:
            model = _Models.model_validate_json(answer.content).data[0]
        except ValidationError as error:
            raise ValueError(f"{url}/v1/models is not that of vLLM: {error}") from error
        return ServerInfo(url, model.id, max_tokens=model.max_model_len)

    def tokenize(self, pool: ServerPool, server: ServerInfo, text: str) -> list[int] | None:
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        answer = pool.ask(server.url, "/tokenize", body)
        if answer.status_code != 200:
            return None
        try:
            return _Tokenized.model_validate_json(answer.content).tokens
        except ValidationError as error:
            raise ValueError(f"{server.url}/tokenize gives no ids: {error}") from error

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, wanted: Sequence[DocumentRows]
    ) -> list[NumberedCall]:
        make = {"hidden": _pooling, "top_k": _completion, "chosen": _generation}[spec.kind]
        return [([number], make(info, spec, width, each)) for number, each in enumerate(wanted)]


def _pooling(info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows) -> Call[Scores]:
    # of a causal model, the rows do not depend on the tokens after the last of them
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
    parse = partial(_hidden_states, spec=spec, width=width, document=document)
    return Call("/pooling", json.dumps(body).encode(), JSON, parse, len(tokens), _NO_POOLING)


def _hidden_states(response: httpx2.Response, spec: SignalSpec, width: int, document: DocumentRows) -> Scores:
    try:
        found = _Pooling.model_validate_json(response.headers.get("metadata", "")).data[0]
    except ValidationError as error:
        raise ValueError(f"the header 'metadata' of /pooling does not describe one array: {error}") from error
    expected = [document.rows.stop, width]
    if found.shape != expected or found.embed_dtype != spec.dtype or found.endianness != "little":
        raise ValueError(f"/pooling gives {found}: expected {expected} of {spec.dtype}, little endian")
    dtype = DTYPES[spec.dtype]
    if len(response.content) != math.prod(expected) * dtype.itemsize:
        raise ValueError(f"/pooling gives {len(response.content):,} bytes for {expected} of {spec.dtype}")
    hidden_NE = torch.frombuffer(bytearray(response.content), dtype=dtype).view(expected)
    if not hidden_NE.isfinite().all():
        raise ValueError("the hidden states of /pooling are not finite")
    return [{"hidden": hidden_NE[document.rows.start :]}]


def _completion(info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows) -> Call[Scores]:
    tokens = document.tokens[: document.rows.stop + 1].tolist()
    body = {
        "model": info.model,
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": spec.top_k,
        "return_tokens_as_token_ids": True,
    }
    parse = partial(_likeliest, spec=spec, document=document)
    return Call("/v1/completions", json.dumps(body).encode(), JSON, parse, len(tokens), _NO_COMPLETIONS)


def _likeliest(response: httpx2.Response, spec: SignalSpec, document: DocumentRows) -> Scores:
    try:
        rows = _Completion.model_validate_json(response.content).choices[0].prompt_logprobs
    except ValidationError as error:
        raise ValueError(f"/v1/completions has no prompt_logprobs of one prompt: {error}") from error
    if len(rows) != document.rows.stop + 1:
        raise ValueError(f"/v1/completions scored {len(rows)} tokens: expected {document.rows.stop + 1}")
    pairs: list[dict[int, float]] = []
    for row, token in zip(document.rows, next_tokens(document), strict=True):
        # entry t + 1 is about token t + 1: it is the distribution of row t
        found = {each: value.logprob for each, value in (rows[row + 1] or {}).items()}
        if token not in found:
            raise ValueError(f"row {row} lacks token {token}, which follows it: the rows are shifted")
        if spec.top_k is not None and len(found) == spec.top_k + 1:
            del found[token]  # it is added if it is not among the likeliest
        pairs.append(found)
    return [sparse_scores(pairs, spec)]


def _generation(info: ServerInfo, spec: SignalSpec, width: int, document: DocumentRows) -> Call[Scores]:
    assert document.ids_NK is not None
    tokens = document.tokens[: document.rows.stop + 1].tolist()
    next_tokens(document)  # this engine scores no last row, either
    scored = {"prompt_logprob_start": document.rows.start, "prompt_logprob_token_ids": document.ids_NK.tolist()}
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, "temperature": 0.0, **scored}}
    parse = partial(_chosen, spec=spec, document=document)
    return Call("/inference/v1/generate", json.dumps(body).encode(), JSON, parse, len(tokens), _NO_SCORES)


def _chosen(response: httpx2.Response, spec: SignalSpec, document: DocumentRows) -> Scores:
    assert document.ids_NK is not None
    with reading("/inference/v1/generate gives no array of log-probabilities"):
        content = base64.b64decode(_Generated.model_validate_json(response.content).prompt_token_id_logprobs)
        log_probs_NK = np.load(io.BytesIO(content), allow_pickle=False)
    if log_probs_NK.shape != tuple(document.ids_NK.shape) or log_probs_NK.dtype.kind != "f":
        raise ValueError(
            f"/inference/v1/generate gives {log_probs_NK.dtype} of shape {log_probs_NK.shape}: expected one number "
            f"for each of {tuple(document.ids_NK.shape)} ids"
        )
    return [scores_of_ids(document.ids_NK.to(torch.int32).numpy(), log_probs_NK, spec)]
