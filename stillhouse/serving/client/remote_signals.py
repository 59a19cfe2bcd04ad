"""A store of signals that servers of the teacher compute on request."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from stillhouse.data import DataError, Documents
from stillhouse.data.media import MediaInputs, MediaProcessor
from stillhouse.data.render.tokenizers import MAX_IDS
from stillhouse.models import model_fingerprint
from stillhouse.serving.client.apis.server_api import Scores, ServerApi, ServerInfo
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.pool import Call, ServerPool
from stillhouse.serving.image_wire import positions_hash, require_accepted
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec, problem_in
from stillhouse.signals.signal_store import SignalStore

if TYPE_CHECKING:
    from stillhouse.serving.client.signal_proof import Proof

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

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Raise DataError for the first document that a server cannot score. what: the documents' name in errors."""
        if documents.has_media:
            assert media_inputs is not None
            self._require_images(documents, what, media_inputs.processor)
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

    def _require_images(self, documents: Documents, what: str, processor: MediaProcessor) -> None:
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
