"""What the client needs of a kind of server that writes completions: how it is asked, answers and takes weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import httpx2
import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.generation.sample import Sampling
from stillhouse.serving.client.pool import ServerError

#: one answer of one server, whatever its status; a body of None is a GET
Ask = Callable[[str, Any], httpx2.Response]
#: what is published: a whole model, or an adapter
Kind = Literal["model", "adapter"]


@dataclass(frozen=True)
class Span:
    """The tokens [start, end) of a completion were written by the weights with this label; None: it is not known."""

    label: str | None
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Published:
    """A version of the student in a folder. label: what servers mark its tokens with. manifest: the sha256 of its
    manifest, and so of all its files.
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


class EngineApi(Protocol):
    """A kind of server.

    path: of requests for completions. marks_tokens: whether an answer has the weights' label for each token, and not
    one for the whole completion. proved: whether log-probabilities are those after the temperature and over the whole
    vocabulary however the server was started. hint: what to do if the server does not know the path.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    marks_tokens: ClassVar[bool]
    proved: ClassVar[bool]
    hint: ClassVar[str]

    def model_name(self, ask: Ask) -> str | None:
        """The name of the model that the server serves, None if requests need none. Raises ValueError."""
        ...

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        """A request for one completion. top: ask for the log-probabilities of so many likeliest tokens, too."""
        ...

    def parse(self, response: httpx2.Response, kind: Kind) -> Answer:
        """Raises ValueError for an answer that cannot be read."""
        ...

    def top_log_probs(self, response: httpx2.Response) -> list[float]:
        """The log-probabilities at the first token that are in the answer, the largest first."""
        ...

    def give(self, ask: Ask, published: Published) -> bool:
        """Let the server load a published version, and mark what it writes from now on with its label.

        May be repeated. Returns False if the server was seen to have been started anew meanwhile. Raises ServerError
        if the server answers that it cannot; no token is then written until a later call has succeeded, or it has
        another label.
        """
        ...

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        """How the server's tokenizer differs from this one, by a text or as a whole; None if it does not.

        Raises ValueError for a server that does not tell.
        """
        ...

    def forget(self, ask: Ask, label: str, kind: Kind) -> None:
        """Free what the server keeps of an earlier version."""
        ...


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


def token_versions(spans: Sequence[Span], versions: dict[str, int], count: int) -> np.ndarray | None:
    """The version of each of `count` tokens; None if one of the labels is not among `versions`.

    Raises ValueError unless the spans cover all tokens in their order.
    """
    found: list[Any] = []
    for each in spans:
        if each.start != len(found) or each.end <= each.start:
            raise ValueError(f"versions of the tokens {each.start} to {each.end} after {len(found)} tokens")
        found += [versions.get(each.label or "")] * (each.end - each.start)
    if len(found) != count or not found:
        raise ValueError(f"versions of {len(found)} tokens for a completion of {count}")
    return None if None in found else np.array(found, np.int32)
