"""The client of `stillhouse serve`. It requests every kind of signal; one request has several documents.

A server with `--generate` gives completions in vLLM's format, and loads a published folder in one request.
"""

from collections.abc import Iterator, Sequence

import httpx2
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerBase

from stillhouse.config.servers import SERVERS
from stillhouse.data import tokenizer_fingerprint
from stillhouse.serving.client.apis.server_api import (
    Published,
    Scores,
    ServerInfo,
    described,
    require,
)
from stillhouse.serving.client.apis.vllm import VllmApi
from stillhouse.serving.client.pool import Ask, Call, RefusedError
from stillhouse.serving.wire import SAFETENSORS, decode_answer, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: the most tokens of a request, unless a single document has more
REQUEST_TOKENS = 4096


class _Info(BaseModel):
    """The answer of `GET /v1/info`, with the field names of `ServerInfo`."""

    stillhouse: str
    model: str
    identity: str = Field(validation_alias="teacher")
    vocabulary: int
    width: int
    dtype: str
    max_tokens: int
    request_tokens: int = Field(validation_alias="max_request_tokens")
    max_top_k: int
    signals: frozenset[str]
    files: dict[str, str]
    quantize: str | None = None


class StillhouseApi(VllmApi):
    """The server loads a version between two batches, so that all tokens of a completion have the same version."""

    kind = SERVERS["stillhouse"]

    # signals

    def recognises(self, ask: Ask) -> bool:
        answer = ask("/v1/info", None)
        return answer.status_code in (401, 403) or (answer.status_code == 200 and '"stillhouse"' in answer.text)

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        info = described(_Info, ask, "/v1/info", self.kind.title)
        return ServerInfo(url, **info.model_dump(exclude={"stillhouse"}))

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> list[Call[Scores]]:
        groups = _groups(documents, min(REQUEST_TOKENS, info.request_tokens or REQUEST_TOKENS))
        return [_scoring(info, spec, width, group) for group in groups]

    # completions

    def model_name(self, ask: Ask) -> str | None:
        return None

    def load_weights(self, ask: Ask, published: Published) -> bool:
        body = {"folder": str(published.folder), "version": published.label, "manifest": published.manifest}
        require(ask("/v1/weights", body), "loading the weights", self.kind.hint)
        return True

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        info = require(ask("/v1/info", None), "/v1/info", self.kind.hint)
        is_same = isinstance(info, dict) and info.get("tokenizer") == tokenizer_fingerprint(tokenizer)
        return None if is_same else "its fingerprint is another one"


def _scoring(info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]) -> Call[Scores]:
    def parse(response: httpx2.Response) -> Scores:
        teacher, scores = decode_answer(response.content, spec, width, documents)
        if teacher != info.identity:
            raise RefusedError(
                f"{response.url.host}:{response.url.port} serves another teacher now (hash {teacher[:12]}) than when "
                f"this run started ({str(info.identity)[:12]}): start the server with the same weights again"
            )
        return scores

    tokens = sum(len(document.tokens) for document in documents)
    return Call("/v1/score", encode_request(spec, documents), SAFETENSORS, parse, tokens)


def _groups(documents: Sequence[DocumentRows], most_tokens: int) -> Iterator[list[DocumentRows]]:
    """Groups of consecutive documents with at most `most_tokens` tokens; a longer document is a group by itself."""
    group: list[DocumentRows] = []
    tokens = 0
    for document in documents:
        if group and tokens + len(document.tokens) > most_tokens:
            yield group
            group, tokens = [], 0
        group.append(document)
        tokens += len(document.tokens)
    if group:
        yield group
