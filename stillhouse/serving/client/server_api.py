"""The client interface of one kind of server: requests signals and completions, and loads new weights.

N is the number of requested rows of a document, and K the number of ids per row. `server_kinds.py` has the kinds.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.config.servers import ServerError, server_kinds
from stillhouse.data import Documents
from stillhouse.data.media import MediaProcessor
from stillhouse.display import enumerated
from stillhouse.objective.signals import TAIL_FLOOR
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving import JSON
from stillhouse.serving.client.http_client import HttpAnswer, parsed
from stillhouse.serving.client.pool import Ask, ServerRequest
from stillhouse.serving.image_support import ImageSupport
from stillhouse.serving.wire import encode_prompt
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

if TYPE_CHECKING:
    from stillhouse.serving.client.server_kinds import HttpServer

#: for each document of a request, the signal's tensors
Scores = list[dict[str, Tensor]]
Kind = Literal["model", "adapter"]

Description = TypeVar("Description", bound=BaseModel)


class NeedsModelError(ValueError):
    """A server does not offer files of the teacher that the run needs, so the user must name the model."""


class UnknownTokenizerError(ValueError):
    """A server does not report its tokenizer."""


@dataclass(frozen=True)
class ServerInfo:
    """A server's description of its teacher and limits. A value is None if the server does not report it.

    model: the teacher's name on the server. identity: a hash of the teacher's weights.
    vocabulary: the number of rows of the teacher's head. width: the teacher's width, E. dtype: the dtype in which the
    teacher computes. max_tokens: the maximum number of tokens of a document. request_tokens: the maximum number of
    tokens of all documents of a request. max_top_k: the maximum number of ids per token. signals: the kinds of
    signals that the server can give. files: the hashes of the teacher's files, by name. quantize: the quantization of
    the teacher. images: the images that the server accepts.
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
    """The tokens [start, end) of a completion. label: the label of their weights; None if it is unknown."""

    label: str | None
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Published:
    """A version of the student in a folder. label: the version's name in answers. manifest: the manifest's sha256."""

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
        """Make a Completion. versions_N: the version of each token. Raises ValueError if a value is invalid."""
        log_probs_N = np.array(self.log_probs, np.float32)
        return Completion(np.array(self.ids, np.int32), log_probs_N, versions_N, self.finish)

    def require(self, sampling: Sampling, limit: int, vocabulary: int) -> None:
        """Raise ValueError if this cannot be the answer to a request with this sampling. limit: the most tokens."""
        ids = self.ids
        if not ids or len(ids) > limit or len(self.log_probs) != len(ids):
            raise ValueError(
                f"a completion of {len(ids)} ids and {len(self.log_probs)} log-probabilities: expected 1 to {limit}, "
                "and the same number of each"
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(f"the ids {min(ids)} to {max(ids)}: expected 0 to {vocabulary - 1}")
        ends = set(sampling.eos_ids)
        if ends & set(ids[:-1]):
            raise ValueError("a completion with tokens after its end of sequence")
        if self.finish == "stop" and ids[-1] not in ends and self.stop not in sampling.stop:
            raise ValueError(
                f"a completion that ends with token {ids[-1]} at {self.stop!r}: expected one of the end tokens "
                f"{sorted(ends)} as its last token, or one of the stop texts {list(sampling.stop)}"
            )


class _Model(BaseModel):
    id: str
    parent: str | None = None  # of an adapter: its base model


class _Models(BaseModel):
    data: list[_Model]


class ServerApi(Protocol):
    """The requests and answers of one kind of server. A kind of server without a feature need not implement
    the methods for it.

    name: the name of the registered kind of server. path: the path of requests for completions.
    marks_tokens: whether an answer has a label for each token. If not, it has one label for the whole completion.
    names_adapters: whether a server keeps several adapters, and a request names one of them. If not, a new adapter
        replaces the server's current adapter.
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
        kind: HttpServer = server_kinds()[self.name]
        return kind

    # signals

    def recognises(self, ask: Ask) -> bool:
        """Whether the server is of this kind."""
        answer = ask(self.kind.description_path, None)
        return self.kind.is_described_by(answer.status, answer.text)

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        """Request the server's description. Raises ValueError if the server does not answer as expected."""

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> Iterable[ServerRequest[Scores]]:
        """Make the requests for the signals of documents. Each request has one or more consecutive documents."""

    def other_version(self, ask: Ask) -> str | None:
        """Return a warning for another version of Stillhouse, or None. Raises ValueError for another wire format."""
        return None

    # completions

    def model_name(self, ask: Ask) -> str | None:
        """Return the model's name, or None if requests need none. Raises ValueError if the server cannot be used."""
        return None

    def body(
        self, model: str | None, ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int, top: int = 0
    ) -> dict[str, Any]:
        """Return the JSON of a request for one completion.

        model: the name of the model or the adapter on the server.
        top: the number of top tokens whose log-probabilities are requested.
        """

    def request_body(
        self,
        model: str | None,
        request: GenerationRequest,
        sampling: Sampling,
        max_new_tokens: int,
        processor: MediaProcessor | None,
    ) -> dict[str, Any] | bytes:
        """Return the JSON of a request for a completion. If the prompt has images, read them with `processor`, and
        return the encoded body.

        Raises ValueError for an image whose file has changed since the data was loaded.
        """
        body = self.body(model, request.prompt_ids.tolist(), sampling, max_new_tokens, request.seed)
        if not request.media:
            return body
        assert processor is not None
        return encode_prompt(body, processor.read_files(request.media, request.prompt_ids))

    def parse(self, response: HttpAnswer, adapter: str | None = None) -> Answer:
        """Read an answer. Raises ValueError if it cannot be read. adapter: the adapter that the request names."""

    def lacks_adapter(self, response: HttpAnswer) -> bool:
        """Whether the server does not have the adapter that the request names, because it was restarted."""
        return response.status == self.unknown_adapter

    def top_log_probs(self, response: HttpAnswer) -> list[float]:
        """Return all log-probabilities in an answer for the position of the first token, in descending order."""

    def require_images(self, ask: Ask, url: str, processor: MediaProcessor, prompts: Documents) -> None:
        """Raise ValueError unless the server accepts the prompts with the image tensors that `processor` makes."""
        raise ValueError(
            f"the prompts have images, and {self.kind.title} would read them with a processor of its own, which "
            "cannot be proved to be the student's: expected the engine transformers, or stillhouse serve --generate "
            "--images"
        )

    def load_weights(self, ask: Ask, published: Published) -> bool:
        """Load a published version on the server. Tokens that the server generates later have the version's label.

        Repeated calls are allowed. Returns False if the server was restarted meanwhile. Raises ServerError if the
        server cannot load the version; until a later call succeeds, no tokens are generated with this label.
        """

    def adapters(self, ask: Ask) -> list[str]:
        """Return the names of the server's adapters. vLLM and SGLang list them together with their models."""
        answer = ask("/v1/models", None)
        if answer.status == 404:  # an older SGLang
            return []
        models = parsed(_Models, answer.content, f"{answer.url} does not list models", self.kind.hint)
        return [model.id for model in models.data if model.parent is not None]

    def load_adapter(self, ask: Ask, published: Published, present: str, hint: str) -> None:
        """Load a version that is an adapter. present: a text in the answer if the server already has the adapter."""
        body = {"lora_name": published.label, "lora_path": str(published.folder)}
        answer = ask(f"{self.adapter_routes}/load_lora_adapter", body)
        if answer.status != 200 and present not in answer.text:
            require(answer, "loading the adapter", hint)

    def forget(self, ask: Ask, adapter: str) -> None:
        """Unload an adapter. The server may first finish the completions that use it."""
        ask(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": adapter})

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        """Return the difference between the server's tokenizer and this tokenizer in words, or None if there is none.
        For the comparison, the server tokenizes `text` or reports a fingerprint.

        Raises UnknownTokenizerError if the server does neither.
        """
        telling = [name for name, kind in server_kinds().items() if getattr(kind, "tells_tokenizer", False)]
        raise UnknownTokenizerError(
            f"{self.kind.title} does not report its tokenizer, so that the ids of a teacher's completions may mean "
            f"other text: expected rollout.engine {enumerated(telling, 'or')}"
        )

    def require_tokenizer(
        self, ask: Ask, url: str, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> None:
        """Raise ValueError if the server has another tokenizer, or UnknownTokenizerError if it reports none."""
        difference = self.tokenizer_difference(ask, model, tokenizer, text)
        if difference is not None:
            raise ValueError(
                f"{url} has another tokenizer than the student: {difference}; expected the same tokenizer"
            )


def ask_description(kind: type[Description], ask: Ask, path: str, name: str) -> Description:
    """Request a server's description, and parse it as `kind`. name: the kind of server, for messages.

    Raises ValueError for an answer of another form.
    """
    answer = ask(path, None)
    if answer.status != 200:
        raise ValueError(
            f"{answer.url} answers {answer.status}: expected 200; check the bearer token (key token_variable)"
        )
    return parsed(kind, answer.content, f"{answer.url} does not answer as {name} does")


def json_call(
    path: str,
    body: dict[str, Any],
    parse: Callable[[HttpAnswer], Scores],
    tokens: int,
    most_bytes: int,
    absent: str = "",
) -> ServerRequest[Scores]:
    """Return a request with a JSON body. most_bytes, absent: see `ServerRequest`."""
    return ServerRequest(path, json.dumps(body).encode(), JSON, parse, tokens, most_bytes, absent)


def require(response: HttpAnswer, what: str, hint: str = "", expected: Mapping[str, str | bool] | None = None) -> Any:
    """Return the content of an answer, parsed if it is JSON.

    Raises ServerError unless the status is 200 and the content has the `expected` values.
    """
    try:
        content = response.json() if response.content else None
    except ValueError:
        content = response.text
    problem = "" if response.status == 200 else f"{response.status} {response.message}"
    if not problem and expected:
        values = {key: content.get(key) for key in expected} if isinstance(content, dict) else None
        if json.dumps(values) != json.dumps(expected):  # as JSON, because 1 == True in Python
            problem = f"got {response.message or 'nothing'}, expected {json.dumps(expected)}"
    if problem:
        raise ServerError(f"{response.url}: {what} failed: {problem}{f'; {hint}' if hint else ''}")
    return content


def top_k_tensors(
    entries: Sequence[Mapping[int, float]], document: DocumentRows, spec: SignalSpec, path: str
) -> dict[str, Tensor]:
    """Make the tensors of "top_k" from an engine's log-probabilities.

    entries: the top ids at each token, with their log-probabilities. Entry t is the prediction of row t − 1 for
    token t. Engines add token t itself if it is not among the top ids.
    path: the path of the request, for messages.
    Raises ValueError unless every entry has the document's token, and K ids with log-probabilities.
    """
    assert spec.top_k is not None
    if len(entries) != document.rows.stop + 1:
        raise ValueError(f"{path} scored {len(entries)} tokens: expected {document.rows.stop + 1}")
    ids_NK = np.empty((len(document.rows), spec.top_k), np.int32)
    log_probs_NK = np.empty((len(document.rows), spec.top_k))
    for number, (row, next_token) in enumerate(zip(document.rows, next_tokens(document), strict=True)):
        log_probs = dict(entries[row + 1])
        if next_token not in log_probs:
            raise ValueError(f"row {row} lacks token {next_token}, which follows it: the rows are shifted")
        if len(log_probs) == spec.top_k + 1:
            del log_probs[next_token]  # the engine added it, because it is not among the top ids
        if len(log_probs) != spec.top_k:
            raise ValueError(f"row {row} has {len(log_probs)} ids: expected the top {spec.top_k}")
        ranked = sorted(log_probs.items(), key=lambda pair: -pair[1])
        ids_NK[number], log_probs_NK[number] = zip(*ranked, strict=True)
    return id_tensors(ids_NK, log_probs_NK, spec)


def id_tensors(ids_NK: np.ndarray, log_probs_NK: np.ndarray, spec: SignalSpec) -> dict[str, Tensor]:
    """Make the tensors of "top_k" or "chosen". The probability outside the ids is computed as 1 − Σp in float64, and
    is at least `TAIL_FLOOR`.

    Raises ValueError for numbers that cannot be log-probabilities.
    """
    mass_N = np.exp(np.minimum(log_probs_NK.astype(np.float64), 1.0)).sum(1)
    if not (mass_N <= 1 + 1e-3).all():
        raise ValueError("its log-probabilities are NaN, or its probabilities add up to more than 1")
    return {
        "ids": torch.from_numpy(ids_NK),
        "log_probs": torch.from_numpy(log_probs_NK).to(DTYPES[spec.dtype]),
        "tail_log_prob": torch.from_numpy(np.log(np.maximum(1 - mass_N, TAIL_FLOOR))).float(),
    }


def next_tokens(document: DocumentRows) -> Sequence[int]:
    """Return the token after each row. Raises ValueError for the document's last row, which no engine scores."""
    following = document.tokens[document.rows.start + 1 : document.rows.stop + 1].tolist()
    if len(following) != len(document.rows):
        raise ValueError("the last row of a document has no next token: expected rows before it")
    return following
