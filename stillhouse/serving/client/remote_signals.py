"""A store of signals that servers of the teacher compute on request."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from textwrap import shorten
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from transformers import AutoConfig

from stillhouse.config import TeacherConfig
from stillhouse.config.server_tokens import server_token
from stillhouse.config.servers import SERVERS
from stillhouse.data import DataError, Documents
from stillhouse.data.render.media_inputs import ImageInputs
from stillhouse.data.render.tokenizers import MAX_IDS
from stillhouse.images.processor import ImageProcessor
from stillhouse.libraries import reading
from stillhouse.models import model_fingerprint
from stillhouse.models.families import text_config
from stillhouse.serving.client.apis.server_api import NeedsModelError, Scores, ServerApi, ServerInfo, server_api
from stillhouse.serving.client.download import download_teacher
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.image_limits import require_accepted
from stillhouse.serving.client.pool import Call, ServerPool
from stillhouse.serving.image_wire import positions_hash
from stillhouse.signals.signal_checks import problem_in
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec
from stillhouse.signals.signal_store import SignalStore

if TYPE_CHECKING:
    from stillhouse.serving.client.signal_proof import Proof

#: the signals that need files of the teacher, and the message about what they need
_NEEDS_MODEL = {
    "hidden": "hidden states from {name} need the teacher's output head",
    "chosen": "ids that the student chooses for {name} need the size of the teacher's vocabulary",
}


#: bytes of requests after which the client waits for the answers, because requests with images are large
BYTES_AT_A_TIME = 128 * 2**20


class RemoteSignals(SignalStore):
    """The signals of a teacher behind one or several servers.

    signal: the signal that is requested. width: E, the teacher's width (0 if it is unknown and not needed).
    vocabulary: the rows of the teacher's head; None if unknown.
    proof: is repeated on all working servers before every `prove_every`-th read (0: never). If the answers do not
    have the teacher's hash, the proof is also repeated on each server that answers again after a failure.
    """

    may_take_long = True  # the pool has its own timeout
    same_conversation = True

    def __init__(
        self,
        pool: ServerPool,
        api: ServerApi,
        servers: Sequence[ServerInfo],
        signal: SignalSpec,
        width: int,
        vocabulary: int | None,
        teacher_folder: Path | None,
    ):
        self.pool, self.api, self.servers = pool, api, servers
        self.signal, self.width, self.vocabulary, self.teacher_folder = signal, width, vocabulary, teacher_folder
        self.name, self.model = ", ".join(server.url for server in servers), servers[0].model
        self.identity = _identity(servers[0], teacher_folder)
        self.proof: Proof | None = None
        self.prove_every = 0
        self._reads = count(1)
        self._proving = Lock()
        #: servers that answer again after a failure and are not proven yet
        self._unproven: set[str] = set()

    def require(self, documents: Documents, what: str, image_inputs: ImageInputs | None = None) -> None:
        """Raise DataError for the first document that a server cannot score. what: the documents' name in errors."""
        if documents.has_images:
            assert image_inputs is not None
            self._require_images(documents, what, image_inputs.processor)
        if self.vocabulary is not None:
            documents.check_ids(self.vocabulary, "teacher")
        limits = [server.max_tokens for server in self.servers if server.max_tokens is not None]
        longest = min(limits, default=np.inf) - self.api.kind.counts_next
        beyond = np.flatnonzero(documents.lengths_D > longest)
        if len(beyond):
            tokens = int(documents.lengths_D[beyond[0]])
            raise DataError(
                documents.sources[int(beyond[0])],
                f"{tokens:,} tokens of {what}, but the teacher's server scores at most {longest:,.0f}: start it with "
                "a longer limit, or cut the documents",
            )

    def _require_images(self, documents: Documents, what: str, processor: ImageProcessor) -> None:
        if not self.api.kind.reads_images:
            raise ValueError(
                f"{what} has images, and {self.api.kind.title} would read them with a processor of its own, which "
                "cannot be proved to be the student's: expected `stillhouse serve --images`, a teacher in this job "
                "(key model), a cache, or documents without images"
            )
        for server in self.servers:
            require_accepted(server.url, server.images, documents, processor, what)

    def require_positions(self, positions: Sequence[Tensor | None]) -> None:
        expected = positions_hash(positions)
        for server in self.servers:
            if server.images is not None and server.images.positions != expected:
                raise ValueError(
                    f"{server.url}: its rotary positions of images are not those of the student: expected a model of "
                    "its family"
                )

    def read(self, documents: Sequence[DocumentRows]) -> Scores:
        if self.proof is not None and self.prove_every and next(self._reads) % self.prove_every == 0:
            self.proof.repeat([server.url for server in self.servers if not self.pool.is_failing(server.url)])
        while True:
            answered_by: set[str] = set()
            scores = self.scores(documents, answered_by=answered_by)
            if not answered_by & self._unproven_servers():
                return scores

    def _unproven_servers(self) -> set[str]:
        """Prove the servers that answer again after a failure, because their weights may have changed.

        Returns the servers that cannot be proven now. Their answers must not be used. All reads wait for the proof.
        """
        if self.proof is None or self.servers[0].identity is not None:
            return set()
        with self._proving:
            self._unproven.update(self.pool.take_returned())
            self._unproven -= self.proof.repeat([url for url in self._unproven if not self.pool.is_failing(url)])
            return set(self._unproven)

    def scores(
        self,
        documents: Sequence[DocumentRows],
        *,
        url: str | None = None,
        spec: SignalSpec | None = None,
        timeout: float | None = None,
        answered_by: set[str] | None = None,
    ) -> Scores:
        """Return the tensors of a signal for each document.

        url: the only server that gets the requests. spec: the signal, instead of the run's signal. timeout: seconds,
        instead of the pool's timeout. answered_by: a set to which the URLs of the servers that answer are added.

        Raises ServerError (an OSError) if no server answers, and ValueError if a server refuses a request.
        """
        spec = spec or self.signal
        scores: Scores = []
        for calls in _in_memory(self.api.calls(self.servers[0], spec, self.width, documents)):
            checked = [self._checked(call, spec, answered_by) for call in calls]
            answers: list[Scores] = self.pool.score(checked, url, timeout)
            scores += chain.from_iterable(answers)
        return scores

    def close(self) -> None:
        self.pool.close()

    def _checked(self, call: Call[Scores], spec: SignalSpec, answered_by: set[str] | None) -> Call[Scores]:
        """Add a check to the call: an answer with numbers that no teacher can give is damaged (see `problem_in`)."""

        def parse(response: HttpAnswer) -> Scores:
            parts = call.parse(response)
            for part in parts:
                if problem := problem_in(spec, self.vocabulary or MAX_IDS, part):
                    raise ValueError(f"{problem} in the answer")
            if answered_by is not None:
                answered_by.add(response.server)
            return parts

        return replace(call, parse=parse)


def connect(
    teacher: TeacherConfig,
    temperature: float,
    *,
    model_folder: Path | None = None,
    warn: Callable[[str], None] = lambda line: None,
    section: str = "teacher",
) -> RemoteSignals:
    """Request the servers' descriptions, and download the files of the teacher that the run needs.

    temperature: the temperature of the teacher's divergence. model_folder: the teacher's configuration, tokenizer and
    weights, used if the servers do not offer them. section: the teacher's section of the configuration.

    Raises ValueError if the servers have different teachers or cannot give the signal, and ServerError (an OSError)
    if a server does not answer.
    """
    token = server_token(f"{section}.token_variable", teacher.token_variable)
    pool = ServerPool(teacher.urls, teacher.timeout, warn, key=f"{section}.timeout", token=token)
    with ExitStack() as on_error:
        on_error.callback(pool.close)
        store = _connected(pool, teacher, temperature, model_folder, warn)
        on_error.pop_all()
    return store


def _connected(
    pool: ServerPool,
    teacher: TeacherConfig,
    temperature: float,
    model_folder: Path | None,
    warn: Callable[[str], None],
) -> RemoteSignals:
    urls = [server.url for server in pool.servers]
    api = _api_of(pool, urls[0], teacher.api)
    for url in urls:
        if other := api.other_version(pool.asker(url)):
            warn(other)
    servers = [api.describe(pool.asker(url), url) for url in urls]
    for server in servers[1:]:
        _require_same(servers[0], server)
    _require_signal(api, servers, teacher, temperature)
    folder = download_teacher(pool, servers[0]) if servers[0].files else model_folder
    if folder is None and teacher.signal in _NEEDS_MODEL:
        need = _NEEDS_MODEL[teacher.signal].format(name=api.kind.name)
        raise NeedsModelError(f"{need}; expected the model that the server has loaded")
    width, vocabulary, dtype = servers[0].width or 0, servers[0].vocabulary, "float32"
    if folder is not None:
        with reading(f"{folder}: its configuration cannot be read"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            text = text_config(config)
            columns, rows = int(text.hidden_size), int(text.vocab_size)
            dtype = str(config.dtype or "float32").removeprefix("torch.")
        if width not in (0, columns) or vocabulary not in (None, rows):
            raise ValueError(
                f"{urls[0]} serves a teacher of width {width} and vocabulary {vocabulary}, but {folder} has "
                f"{columns} and {rows}"
            )
        width, vocabulary = columns, rows
    return RemoteSignals(pool, api, servers, _spec(teacher, temperature, dtype), width, vocabulary, folder)


def _in_memory(calls: Iterable[Call[Scores]]) -> Iterator[list[Call[Scores]]]:
    """Divide requests into groups that are in memory together: those of texts are small, those of images are not."""
    group: list[Call[Scores]] = []
    size = 0
    for call in calls:
        group.append(call)
        size += len(call.content) if isinstance(call.content, bytes) else 0
        if size >= BYTES_AT_A_TIME:
            yield group
            group, size = [], 0
    if group:
        yield group


def _identity(first: ServerInfo, teacher_folder: Path | None) -> str:
    """The teacher's hash as the server reports it, else the hash of local files, else a hash of its name."""
    if first.identity is not None:
        return first.identity
    if teacher_folder is not None:
        return model_fingerprint(teacher_folder)
    return hashlib.sha256(first.model.encode()).hexdigest()


def _require_same(first: ServerInfo, other: ServerInfo) -> None:
    """Raise ValueError for servers of different teachers. Without the teacher's hash, their names must be equal."""
    names = ("identity", "vocabulary", "width", "dtype", "files")
    for name in names if first.identity is not None else (*names, "model"):
        if getattr(first, name) != getattr(other, name):
            one, two = (shorten(str(getattr(server, name)), 100) for server in (first, other))
            raise ValueError(
                f"{first.url} and {other.url} serve different teachers: {name} is {one} and {two}; expected "
                "servers of one teacher"
            )


def _require_signal(
    api: ServerApi, servers: Sequence[ServerInfo], teacher: TeacherConfig, temperature: float
) -> None:
    for server in servers:
        signals = api.kind.signals if server.signals is None else server.signals
        if teacher.signal not in signals:
            raise ValueError(
                f"{server.url} ({api.kind.name}) cannot give the signal {teacher.signal}: expected "
                f"{' or '.join(sorted(signals))}"
            )
        most = server.max_top_k
        if teacher.signal in ("top_k", "chosen") and most is not None and teacher.top_k > most:
            raise ValueError(f"{server.url} gives at most {most} ids per token, got top_k={teacher.top_k}")
    if teacher.signal != "hidden" and not api.kind.any_temperature and temperature != 1.0:
        raise ValueError(
            f"{api.kind.name} gives {teacher.signal} only at temperature 1, whatever it is asked for; the objective "
            f"has temperature {temperature:g}: expected the signal hidden, which gives every temperature"
        )


def _spec(teacher: TeacherConfig, temperature: float, saved_dtype: str) -> SignalSpec:
    if teacher.signal != "hidden":
        return SignalSpec(teacher.signal, "float32", teacher.top_k, temperature)
    dtype = saved_dtype if teacher.dtype == "auto" else teacher.dtype
    return SignalSpec("hidden", dtype if dtype in DTYPES else "float32")


def _api_of(pool: ServerPool, url: str, name: str) -> ServerApi:
    for kind in SERVERS if name == "auto" else [name]:
        api = server_api(kind)
        if name != "auto" or api.recognises(pool.asker(url)):
            return api
    raise ValueError(f"{url} is not a server that is known here: expected {', '.join(SERVERS)}")
