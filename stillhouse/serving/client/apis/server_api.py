"""The interface to one kind of server: it requests signals and completions, and loads new weights."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.config.servers import ServerError, server_kinds
from stillhouse.data import Documents
from stillhouse.data.media import MediaProcessor
from stillhouse.display import enumerated
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving.client.http_client import HttpAnswer, parsed
from stillhouse.serving.client.pool import Ask, ServerRequest
from stillhouse.serving.image_wire import ImageSupport, encode_prompt
from stillhouse.serving.wire import JSON
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

if TYPE_CHECKING:
    from stillhouse.serving.servers import HttpServer

#: for each document of a request, the signal's tensors
Scores = list[dict[str, Tensor]]
#: the kinds of published weights: a full model, or an adapter
Kind = Literal["model", "adapter"]

T = TypeVar("T")
Description = TypeVar("Description", bound=BaseModel)


#: prompts. The log-probabilities of the top tokens after them identify a model, and show the options of its server
_PROMPTS = ((1,), (2, 3), (5, 7, 11), (13, 17, 19, 23), (29, 31, 37, 41, 43), (47, 53), (59, 61, 67), (71,))
#: the number of requested top tokens: the gap between the first and the fifth is wider than to the second
_TOP = 5
#: if two options would give log-probabilities with a smaller difference, in nats, they cannot be distinguished
_APART = 0.02


class NeedsModelError(ValueError):
    """A server does not offer the teacher's files that the run needs: the user must give the run the model."""


class UnknownTokenizerError(ValueError):
    """A server does not report its tokenizer."""


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of its teacher and limits. None: the server does not report the value.

    model: the teacher's name on the server. identity: a hash of its weights. vocabulary: rows of its head. width: E.
    dtype: of its computation. max_tokens, request_tokens: the most tokens of a document, and of all documents of a
    request. max_top_k: the most ids per token. files: the names and hashes of the files that the server offers.
    images: those that the server accepts; None: it accepts none.
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
    images: ImageSupport | None = None


@dataclass(frozen=True)
class VersionSpan:
    """The tokens [start, end) of a completion. label: the label of their weights, or None if it is unknown."""

    label: str | None
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Published:
    """A version of the student in a folder. label: its name in the servers' answers. manifest: the sha256 of the
    folder's manifest, which lists the hashes of the folder's files.
    """

    version: int
    folder: Path
    label: str
    kind: Kind
    manifest: str = ""


@dataclass(frozen=True)
class Answer:
    """A server's completion. stop: the stop text that ended the completion, if there is one."""

    ids: list[int]
    log_probs: list[float]
    spans: list[VersionSpan]
    finish: Literal["stop", "length"]
    stop: str | None = None

    def completion(self, versions_N: np.ndarray) -> Completion:
        """versions_N: the version of each token. Raises ValueError as `Completion` does."""
        log_probs_N = np.array(self.log_probs, np.float32)
        return Completion(np.array(self.ids, np.int32), log_probs_N, versions_N, self.finish)

    def require(self, sampling: Sampling, limit: int, vocabulary: int) -> None:
        """Raise ValueError unless a server that was asked for `limit` tokens of this sampling can answer this."""
        ids = self.ids
        if not ids or len(ids) > limit or len(self.log_probs) != len(ids):
            raise ValueError(
                f"a completion of {len(ids)} ids, {len(self.log_probs)} log-probabilities: expected 1 to {limit}"
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(f"the ids {min(ids)} to {max(ids)}: expected 0 to {vocabulary - 1}")
        ends = set(sampling.eos_ids)
        if ends & set(ids[:-1]):
            raise ValueError("a completion that goes on after its end of sequence")
        if self.finish == "stop" and ids[-1] not in ends and self.stop not in sampling.stop:
            raise ValueError(
                f"a completion that ends with token {ids[-1]} at {self.stop!r}: expected the end of sequence "
                f"{sorted(ends)}, among its tokens, or one of the texts {list(sampling.stop)}"
            )


class _Model(BaseModel):
    id: str
    parent: str | None = None  # the model of an adapter


class _Models(BaseModel):
    data: list[_Model]


class ServerApi(Protocol):
    """The requests and answers of one kind of server. A subclass may lack methods for what its servers cannot do.

    name: the name of the kind of server among the registered ones.
    path: the path of requests for completions.
    marks_tokens: whether an answer has the label of each token, or only one label for the completion.
    names_adapters: whether a request names the adapter of its version, which the server keeps beside others. If not,
        an adapter replaces the server's adapter, as a model replaces its weights.
    unknown_adapter: the status of an answer if the server does not have the adapter that a request names.
    adapter_routes: the beginning of the paths that load and unload adapters.
    is_tied: whether the student's head is tied to its embedding and the server gets full models, not adapters.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    marks_tokens: ClassVar[bool] = True
    names_adapters: ClassVar[bool] = True
    unknown_adapter: ClassVar[int] = 404
    adapter_routes: ClassVar[str] = "/v1"
    is_tied: bool

    def __init__(self, *, is_tied: bool = False):
        self.is_tied = is_tied

    @property
    def kind(self) -> "HttpServer":
        """What is known of servers of this kind."""
        kind: HttpServer = server_kinds()[self.name]
        return kind

    # signals

    def recognises(self, ask: Ask) -> bool:
        """Whether the server is of this kind."""

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        """Raises ValueError if the server at this address does not answer as expected."""

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> Iterable[ServerRequest[Scores]]:
        """The requests for the signals of documents, each for one or more consecutive documents. An iterator may read
        images when a request is taken from it.
        """

    def other_version(self, ask: Ask) -> str | None:
        """A warning if the server is a Stillhouse of another version than this one; None if not.

        Raises ValueError if the two versions do not understand each other's bodies.
        """
        return None

    # completions

    def model_name(self, ask: Ask) -> str | None:
        """The model's name on the server; None if requests need no name. Raises ValueError for an unusable server."""
        return None

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        """A request for one completion. model: the name of the model or the adapter on the server. top: the number of
        top tokens whose log-probabilities are requested.
        """

    def request_body(
        self,
        model: str | None,
        request: GenerationRequest,
        sampling: Sampling,
        max_new_tokens: int,
        processor: MediaProcessor | None,
    ) -> dict[str, Any] | bytes:
        """The JSON of a request for a completion; bytes: the body of a prompt with images, which `processor` reads.
        Raises ValueError for an image whose file has changed since the data was loaded.
        """
        body = self.body(model, request.prompt_ids.tolist(), sampling, max_new_tokens, request.seed)
        if not request.media:
            return body
        assert processor is not None
        return encode_prompt(body, processor.read_files(request.media, request.prompt_ids))

    def parse(self, response: HttpAnswer, adapter: str | None = None) -> Answer:
        """Raises ValueError for an answer that cannot be read. adapter: the adapter that the request names."""

    def lacks_adapter(self, response: HttpAnswer) -> bool:
        """Whether the server does not have the adapter that the request names, because it was restarted."""
        return response.status == self.unknown_adapter

    def top_log_probs(self, response: HttpAnswer) -> list[float]:
        """All log-probabilities that the answer has for the first token, in descending order."""

    def require_images(self, ask: Ask, url: str, processor: MediaProcessor, prompts: Documents) -> None:
        """Raise ValueError unless these prompts with images can be sent, as this processor makes their tensors."""
        raise ValueError(
            f"the prompts have images, and {self.kind.title} would read them with a processor of its own, which "
            "cannot be proved to be the student's: expected the engine transformers, or stillhouse serve --generate "
            "--images"
        )

    def load_weights(self, ask: Ask, published: Published) -> bool:
        """Load a published version on the server. Tokens that it generates afterwards have the version's label.

        The call may be repeated. Returns False if the server was restarted meanwhile. Raises ServerError if it cannot
        load the version. Until a later call succeeds, it generates no tokens, or tokens with another label.
        """

    def adapters(self, ask: Ask) -> list[str]:
        """The names of the server's adapters, which vLLM and SGLang list beside their models."""
        answer = ask("/v1/models", None)
        if answer.status == 404:  # an older SGLang
            return []
        models = parsed(_Models, answer.content, f"{answer.url} does not list models", self.kind.hint)
        return [model.id for model in models.data if model.parent is not None]

    def load_adapter(self, ask: Ask, published: Published, present: str, hint: str) -> None:
        """Load a version that is an adapter. present: in the answer of a server that has it already."""
        body = {"lora_name": published.label, "lora_path": str(published.folder)}
        answer = ask(f"{self.adapter_routes}/load_lora_adapter", body)
        if answer.status != 200 and present not in answer.text:
            require(answer, "loading the adapter", hint)

    def forget(self, ask: Ask, adapter: str) -> None:
        """Free the server's memory of an earlier version. The server may first finish the completions that use it."""
        ask(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": adapter})

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        """The difference between the server's tokenizer and this one, in words; None if they are equal. The server
        tokenizes `text`, or reports a fingerprint. Raises UnknownTokenizerError if it does not report its tokenizer.
        """
        telling = [name for name, kind in server_kinds().items() if getattr(kind, "tells_tokenizer", False)]
        raise UnknownTokenizerError(
            f"{self.kind.title} does not tell its tokenizer, so that the ids of a teacher's completions may mean "
            f"other text: expected rollout.engine {enumerated(telling, 'or')}"
        )

    def require_tokenizer(
        self, ask: Ask, url: str, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> None:
        """Raise ValueError if the server has another tokenizer, UnknownTokenizerError if it does not report it."""
        difference = self.tokenizer_difference(ask, model, tokenizer, text)
        if difference is not None:
            raise ValueError(
                f"{url} has another tokenizer than the student: {difference}; expected the same tokenizer"
            )

    def one_token(
        self,
        ask: Ask,
        model: str | None,
        prompt: Sequence[int],
        sampling: Sampling,
        parse: Callable[[HttpAnswer], T],
        top: int = 0,
    ) -> T:
        """Request a completion of one token. Raises ValueError for an answer that cannot be read."""
        response = ask(self.path, self.body(model, prompt, sampling, 1, 0, top=top))
        if response.status != 200:
            raise ValueError(f"{response.url}: {response.status} {response.message}; {self.kind.hint}")
        try:
            return parse(response)
        except ValueError as error:
            raise ValueError(f"{response.url}: {error}") from error

    def require_log_probs(self, ask: Ask, url: str, model: str | None, sampling: Sampling, vocabulary: int) -> None:
        """Raise ValueError unless the server's log-probabilities are those after the temperature and over the full
        vocabulary, which training needs. Some options of an engine change them, and its answers do not show these.

        The gap between the first and the last top token must be the gap at temperature 1, divided by the temperature.
        If a request has top_k=2 and the server normalises over two tokens, the first log-probability is too large.
        """
        temperature, kind = sampling.temperature, self.kind
        if temperature == 0 or (temperature == 1 and sampling.samples_all_tokens):
            return

        def top(prompt: Sequence[int], sampling: Sampling, count: int = _TOP) -> list[float]:
            log_probs = self.one_token(ask, model, prompt, sampling, self.top_log_probs, _TOP)[:count]
            if len(log_probs) < 2 or not all(map(math.isfinite, log_probs)):
                raise ValueError(
                    f"{url} gives {log_probs} for the top tokens: expected at least two log-probabilities"
                )
            return log_probs

        for prompt in identifying_prompts(vocabulary):
            before, after = top(prompt, Sampling(1)), top(prompt, Sampling(1, temperature=temperature))
            if temperature != 1:
                gap, scaled_gap = before[0] - before[-1], after[0] - after[-1]
                if abs(gap / temperature - gap) < _APART:
                    continue
                if abs(scaled_gap - gap) < abs(scaled_gap - gap / temperature):
                    raise ValueError(
                        f"{url} gives log-probabilities before the temperature, and the temperature is "
                        f"{temperature:g}: expected {kind.after_temperature}, or a temperature of 1"
                    )
            if not sampling.samples_all_tokens:
                among_two = -math.log1p(math.exp((before[1] - before[0]) / temperature))
                if abs(among_two - after[0]) < _APART:
                    continue
                cut = top(prompt, Sampling(1, temperature=temperature, top_k=2), 2)[0]
                if abs(cut - among_two) < abs(cut - after[0]):
                    at_one = kind.over_all_tokens and f", or for a temperature of 1 {kind.over_all_tokens}"
                    raise ValueError(
                        f"{url} gives log-probabilities among the tokens that top_p, top_k and min_p leave, and "
                        "training needs those over the whole vocabulary: expected top_p=1, top_k=0 and "
                        f"min_p=0{at_one}"
                    )
            return
        raise ValueError(
            f"{url} writes every token with nearly the same probability or with certainty, so that it cannot be "
            "proved which log-probabilities it gives: expected a model that was trained, or a temperature of 1 and "
            "all tokens"
        )


def identifying_prompts(vocabulary: int) -> list[list[int]]:
    """Prompts. The top tokens after them and their log-probabilities identify a model."""
    return [[token % vocabulary for token in prompt] for prompt in _PROMPTS]


def ask_description(kind: type[Description], ask: Ask, path: str, name: str) -> Description:
    """Request a server's description. Raises ValueError unless the answer has the form of the server `name`."""
    answer = ask(path, None)
    if answer.status != 200:
        raise ValueError(
            f"{answer.url} answers {answer.status}: expected 200, with the right token (key token_variable)"
        )
    return parsed(kind, answer.content, f"{answer.url} is not that of {name}")


def json_call(
    path: str,
    body: dict[str, Any],
    parse: Callable[[HttpAnswer], Scores],
    tokens: int,
    most_bytes: int,
    absent: str = "",
) -> ServerRequest[Scores]:
    """A request with a JSON body. most_bytes, absent: see `ServerRequest`."""
    return ServerRequest(path, json.dumps(body).encode(), JSON, parse, tokens, most_bytes, absent)


def require(response: HttpAnswer, what: str, hint: str = "") -> Any:
    """The content of an answer, parsed if it is JSON. Raises ServerError unless the status is 200."""
    if response.status != 200:
        refuse(response, what, f"{response.status} {response.message}", hint)
    try:
        return response.json() if response.content else None
    except ValueError:
        return response.text


def refuse(response: HttpAnswer, what: str, why: str, hint: str = "") -> NoReturn:
    raise ServerError(f"{response.url}: {what} failed: {why}{f'; {hint}' if hint else ''}")
