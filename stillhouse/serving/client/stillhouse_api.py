"""Our own server, `stillhouse serve`: every signal, as one safetensors body for several documents."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import httpx2
from pydantic import BaseModel, ConfigDict, ValidationError

from stillhouse.serving.client.api import NumberedCall, Scores, ServerInfo
from stillhouse.serving.client.pool import Call, RefusedError, ServerPool
from stillhouse.serving.wire import SAFETENSORS, decode_answer, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: tokens of a request, unless a single document has more
REQUEST_TOKENS = 4096


class _Info(BaseModel):
    model_config = ConfigDict(extra="ignore")

    stillhouse: str
    model: str
    teacher: str
    vocabulary: int
    width: int
    dtype: str
    max_tokens: int
    max_request_tokens: int
    max_top_k: int
    signals: list[str]
    files: dict[str, str]
    quantize: str | None = None


class StillhouseApi:
    name: ClassVar[str] = "stillhouse"
    signals: ClassVar[frozenset[str]] = frozenset({"hidden", "top_k", "chosen", "sampled"})
    any_temperature: ClassVar[frozenset[str]] = signals

    def recognises(self, pool: ServerPool, url: str) -> bool:
        answer = pool.ask(url, "/v1/info")
        return answer.status_code in (401, 403) or (answer.status_code == 200 and '"stillhouse"' in answer.text)

    def describe(self, pool: ServerPool, url: str) -> ServerInfo:
        answer = pool.ask(url, "/v1/info")
        if answer.status_code != 200:
            raise ValueError(f"{url}/v1/info answers {answer.status_code}: expected 200, with the right token")
        try:
            info = _Info.model_validate_json(answer.content)
        except ValidationError as error:
            raise ValueError(f"{url}/v1/info is not that of `stillhouse serve`: {error}") from error
        return ServerInfo(
            url,
            info.model,
            info.teacher,
            info.vocabulary,
            info.width,
            info.dtype,
            info.max_tokens,
            info.max_request_tokens,
            info.max_top_k,
            frozenset(info.signals),
            info.files,
            info.quantize,
        )

    def tokenize(self, pool: ServerPool, server: ServerInfo, text: str) -> list[int] | None:
        return None

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, wanted: Sequence[DocumentRows]
    ) -> list[NumberedCall]:
        groups = _groups(wanted, min(REQUEST_TOKENS, info.request_tokens or REQUEST_TOKENS))
        return [(numbers, _call(info, spec, width, [wanted[at] for at in numbers])) for numbers in groups]


def _call(info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]) -> Call[Scores]:
    def parse(response: httpx2.Response) -> Scores:
        teacher, scores = decode_answer(response.content, spec, width, documents)
        if teacher != info.identity:
            raise RefusedError(
                f"{response.url.host}:{response.url.port} serves another teacher now (hash {teacher[:12]}) than when "
                f"this run started ({str(info.identity)[:12]}): start the server with the same weights again"
            )
        return scores

    tokens = sum(len(each.tokens) for each in documents)
    return Call("/v1/score", encode_request(spec, documents), SAFETENSORS, parse, tokens)


def _groups(wanted: Sequence[DocumentRows], most: int) -> Iterator[list[int]]:
    """The numbers of neighbouring documents that have at most so many tokens together; or of one longer document."""
    group: list[int] = []
    held = 0
    for number, each in enumerate(wanted):
        if group and held + len(each.tokens) > most:
            yield group
            group, held = [], 0
        group.append(number)
        held += len(each.tokens)
    if group:
        yield group
