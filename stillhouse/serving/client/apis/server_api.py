"""What a client needs of a kind of server: how it is asked for signals and completions, and how it takes weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

import httpx2
import numpy as np
from pydantic import BaseModel, ValidationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.generation.sample import Completion, Sampling
from stillhouse.serving.client.pool import Ask, Call, ServerError
from stillhouse.serving.wire import JSON
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: for each document of a request, the signal's tensors
Scores = list[dict[str, Tensor]]
#: what is published: a whole model, or an adapter
Kind = Literal["model", "adapter"]

Parsed = TypeVar("Parsed", bound=BaseModel)


class NeedsModelError(ValueError):
    """A server does not offer what the run needs of the teacher's files, so that the run must have the model."""


class UnknownTokenizerError(ValueError):
    """A server does not tell its tokenizer."""


@dataclass(frozen=True)
class ServerInfo:
    """What a teacher's server says of itself; None: the server does not report it.

    model: the name under which it serves the teacher. identity: a hash of the teacher's weights.
    vocabulary: rows of the teacher's head. width: E. dtype: in which the teacher computes.
    max_tokens: of the longest document that it scores. request_tokens: of all documents of a request.
    max_top_k: ids per token. signals: which it gives.
    files: the names and hashes of the files of the teacher's folder, if it offers them.
    quantize: how its layers are quantized, if they are.
    """

    url: str
    model: str
    identity: str | None = None
    vocabulary: int | None = None
    width: int | None = None
    dtype: str | None = None
    max_tokens: int | None = None
    request_tokens: int | None = None
    max_top_k: int | None = None
    signals: frozenset[str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    quantize: str | None = None


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of a completion were written by the weights with this label; None: it is not known."""

    label: str | None
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Published:
    """A version of the student in a folder.

    label: what servers mark its tokens with. manifest: the sha256 of its manifest, and so of all its files.
    """

    version: int
    folder: Path
    label: str
    kind: Kind
    manifest: str = ""


@dataclass(frozen=True)
class Answer:
    """A completion as a server gives it. stop: the text at which it ended, if it ended at one."""

    ids: list[int]
    log_probs: list[float]
    spans: list[Span]
    finish: Literal["stop", "length"]
    stop: str | None = None

    def completion(self, versions_N: np.ndarray) -> Completion:
        """The completion with the version of each token. Raises ValueError as `Completion` does."""
        log_probs_N = np.array(self.log_probs, np.float32)
        return Completion(np.array(self.ids, np.int32), log_probs_N, versions_N, self.finish)


class ServerApi(Protocol):
    """A kind of server that gives a teacher's signals and writes completions.

    signals: which it can give; only those in `any_temperature` also at a temperature other than 1.
    path: of requests for completions.
    marks_tokens: whether an answer has the weights' label for each token, and not one for the whole completion.
    proved: whether log-probabilities are those after the temperature and over the whole vocabulary however the server
        was started.
    takes_adapters: whether it loads an adapter as a version of the student.
    hint: what to do if the server does not know the path.
    """

    name: ClassVar[str]
    signals: ClassVar[frozenset[str]]
    any_temperature: ClassVar[frozenset[str]]
    path: ClassVar[str]
    marks_tokens: ClassVar[bool]
    proved: ClassVar[bool]
    takes_adapters: ClassVar[bool]
    hint: ClassVar[str]

    def recognises(self, ask: Ask) -> bool:
        """Whether the server is of this kind."""

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        """Raises ValueError if the server at this address does not answer as expected."""

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> list[Call[Scores]]:
        """The requests that give the signals of documents, each for one or several that follow one another."""

    def model_name(self, ask: Ask) -> str | None:
        """The name of the model that the server serves, None if requests need none. Raises ValueError."""

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        """A request for one completion. top: ask for the log-probabilities of so many most probable tokens, too."""

    def parse(self, response: httpx2.Response, kind: Kind) -> Answer:
        """Raises ValueError for an answer that cannot be read."""

    def top_log_probs(self, response: httpx2.Response) -> list[float]:
        """The log-probabilities at the first token that are in the answer, the largest first."""

    def give(self, ask: Ask, published: Published) -> bool:
        """Let the server load a published version, and mark what it writes from now on with its label.

        May be repeated. Returns False if the server was seen to have been started anew meanwhile. Raises ServerError
        if the server answers that it cannot; no token is then written until a later call has succeeded, or it has
        another label.
        """

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        """How the server's tokenizer differs from this one, by a text or as a whole; None if it does not.

        Raises UnknownTokenizerError for a server that does not tell.
        """

    def forget(self, ask: Ask, label: str, kind: Kind) -> None:
        """Free what the server keeps of an earlier version."""


def require_tokenizer(
    api: ServerApi, ask: Ask, url: str, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    """Raise ValueError if the server's tokenizer is another one, and UnknownTokenizerError if it is not told."""
    difference = api.tokenizer_difference(ask, model, tokenizer, text)
    if difference is not None:
        raise ValueError(f"{url} has another tokenizer than the student: {difference}; expected the same tokenizer")


def described(kind: type[Parsed], ask: Ask, path: str, name: str) -> Parsed:
    """What a server says of itself. Raises ValueError unless it answers as a server of this name."""
    answer = ask(path, None)
    if answer.status_code != 200:
        raise ValueError(f"{answer.url} answers {answer.status_code}: expected 200, with the right token")
    return parsed(kind, answer.content, f"{answer.url} is not that of {name}")


def json_call(
    path: str, body: dict[str, Any], parse: Callable[[httpx2.Response], Scores], tokens: int, absent: str = ""
) -> Call[Scores]:
    """absent: see `Call`."""
    return Call(path, json.dumps(body).encode(), JSON, parse, tokens, absent)


def parsed(kind: type[Parsed], content: str | bytes, what: str, hint: str = "") -> Parsed:
    """Raises ValueError for JSON that is not of this kind, in one line: what, the first problem, hint."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{first['msg']}, got {str(first['input'])[:100]!r}"
        raise ValueError(": ".join(filter(None, [what, place, problem])) + (f"; {hint}" if hint else "")) from error


def require(response: httpx2.Response, what: str, hint: str = "") -> Any:
    """The JSON of an answer. Raises ServerError unless its status is 200."""
    if response.status_code != 200:
        refuse(response, what, f"{response.status_code} {response.text.strip()[:500]}", hint)
    try:
        return response.json() if response.content else None
    except ValueError:
        return response.text


def refuse(response: httpx2.Response, what: str, why: str, hint: str = "") -> NoReturn:
    raise ServerError(f"{response.url}: {what} failed: {why}{f'; {hint}' if hint else ''}")
