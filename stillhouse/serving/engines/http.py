"""Completions from servers: each token with the version of the weights that wrote it, and nothing by other weights.

Every version has a label that only this engine uses. A server that was started anew has its first weights again and
another label: its answers are discarded, it is given the newest version, and their requests are sent again.
"""

import json
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.display import escaped
from stillhouse.generation.published import published_folder
from stillhouse.generation.sample import Completion, GenerationRequest, Sampling
from stillhouse.serving.client.pool import (
    AskAgainError,
    Call,
    ServerError,
    ServerPool,
    UnreachableError,
)
from stillhouse.serving.engines.api import (
    Answer,
    Ask,
    EngineApi,
    Kind,
    Published,
    require,
    token_versions,
)
from stillhouse.serving.engines.probe import (
    KNOWN_BY,
    Probe,
    probing,
    same_weights,
)
from stillhouse.serving.engines.proof import MOST_LIKELY, prove_log_probs

#: completions that a server writes at a time; engines batch them, and queue what is too many
IN_FLIGHT = 256
#: seconds in which one of several servers must accept a new version, before the others go on without it
PATIENCE = 10.0
#: so many times in a row a server may come back with other weights
MOST_RESTORED = 10
_JSON = "application/json"
_AGAIN = (
    "{url} has other weights again and again: expected a server that is not started anew all the time, and no other "
    "job that gives it weights"
)
#: an unknown adapter: the server was started anew
_LOST = 404


@dataclass(eq=False)
class _Server:
    """told: what it was last given, another object each time; None while it is not known which weights it has.
    model: the name that requests need. restored: how often it came back with other weights since its last answer.
    is_absent: it has not answered, and is given the newest version in the background. probe: with the weights that
    it was given last.
    """

    url: str
    model: str | None = None
    told: Published | None = None
    restored: int = 0
    is_absent: bool = False
    probe: Probe = field(default_factory=Probe)
    lock: threading.Lock = field(default_factory=threading.Lock)


class ServedEngine:
    """Servers of one kind that write the student's completions (a RolloutEngine).

    vocabulary: rows of the student's head; ids outside of it are never sent (one of them ends a vLLM) nor accepted.
    timeout: seconds without an answer of any server after which futures raise ServerError; also for one answer.
    token: the bearer token. warn: is called with a line when a server fails or comes back.

    own_weights: the servers write with the weights that they have, such as a teacher's, and are given none.
    Otherwise `update_weights` must be called before `generate`. probes: prompts that each server completes after it
    was given weights (see `probe.py`), so that the caller can score them (`probed`, `proved`). run: the identity that
    published weights must name; empty: any.

    The constructor raises ValueError for a server that does not give the log-probabilities that training needs; with
    own_weights they are not needed, and the servers must have the same weights.
    """

    def __init__(
        self,
        urls: Sequence[str],
        sampling: Sampling,
        api: EngineApi,
        *,
        vocabulary: int,
        timeout: float,
        token: str | None = None,
        warn: Callable[[str], None] = lambda line: None,
        own_weights: bool = False,
        probes: Sequence[Sequence[int]] = ((0,),),
        run: str = "",
    ):
        self._sampling, self._api, self._vocabulary, self._timeout = sampling, api, vocabulary, timeout
        self.own_weights = own_weights
        #: with own_weights, the likeliest tokens after a few prompts and their log-probabilities, to know them by
        self.likeliest: list[tuple[int, float]] = []
        self._warn, self._publisher, self._prefix = warn, run, secrets.token_hex(4)
        self._pool = ServerPool(
            urls, timeout, token, warn, model="student", answer_seconds=timeout, in_flight=IN_FLIGHT
        )
        self._servers = {each.url: _Server(each.url) for each in self._pool.servers}
        self._versions: dict[str, int] = {}
        self._newest: Published | None = None
        self._probes = probes
        #: of the version that was proved last, with the nats that rounding causes
        self._proved = Probe(), 0.0
        with ExitStack() as stack:
            stack.callback(self._pool.close)
            for server in self._servers.values():
                server.model = api.model_name(self._ask(server.url))
                if own_weights:
                    self._keep_weights(server)
                elif not api.proved:
                    prove_log_probs(server.url, partial(self._top_log_probs, server), sampling, vocabulary)
            stack.pop_all()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Ask for completions; returns at once. Raises ValueError for ids outside of the vocabulary."""
        if self._newest is None:
            raise ValueError("the servers have no version of the student yet: expected update_weights first")
        calls = [self._call(each, self._newest.kind) for each in requests]
        return [self._pool.submit(each) for each in calls]

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Give all servers a published version, side by side, and prove that they write with it.

        A server that does not answer meanwhile is given it when it answers again. Raises ServerError if a server
        answers that it cannot load it (it then stays paused), or if no server answers.
        """
        assert not self.own_weights, "these servers keep their weights"
        if folder is None:
            raise ValueError("servers read weights from a folder: expected the one that was published")
        folder = folder.resolve()
        with published_folder(folder) as content:
            manifest, sha256 = content.manifest, content.sha256
        if manifest.version != version:
            raise ValueError(f"{folder} holds version {manifest.version}: expected {version}")
        if self._publisher and manifest.run != self._publisher:
            raise ValueError(
                f"{folder} holds weights of the run '{escaped(manifest.run)}', not of this run '{self._publisher}': "
                "expected a folder to which nobody else writes"
            )
        before, label = self._newest, f"{self._prefix}-{version}-{len(self._versions)}"
        published = Published(version, folder, label, manifest.kind, sha256)
        self._versions[label], self._newest = version, published
        # a server that is gone must not cost its patience in every step
        present = [each for each in self._servers.values() if not each.is_absent]
        absent = self._give_all(present, min(PATIENCE, self._timeout))
        if len(absent) == len(present):
            absent = self._give_all(list(self._servers.values()), self._timeout)
            if len(absent) == len(self._servers):
                raise next(iter(absent.values()))
        for url in absent:
            self._restore_later(self._servers[url])
        if before is not None:
            for server in self._servers.values():
                if not server.is_absent:
                    self._api.forget(self._ask(server.url, PATIENCE), before.label, before.kind)

    @property
    def probed(self) -> dict[str, tuple[Completion, ...]]:
        """By URL, what the servers have written for the probes when they were given the newest version."""
        assert self._newest is not None
        probes = {url: each.probe for url, each in self._servers.items()}
        return {url: each.completions for url, each in probes.items() if each.label == self._newest.label}

    def proved(self, url: str, most: float) -> None:
        """What this server has written for the probes is by the newest version. Servers that are given it later must
        find the same tokens likeliest. most: nats that rounding causes.
        """
        self._proved = self._servers[url].probe, most

    def close(self) -> None:
        self._pool.close()

    def _keep_weights(self, server: _Server) -> None:
        """Take the server's weights as version 0. Raises ValueError if they are not those of the other servers."""
        answers = [self._greedy(server, ids) for ids in KNOWN_BY]
        labels = {each.label or "" for answer in answers for each in answer.spans}
        likeliest = [(each.ids[0], each.log_probs[0]) for each in answers]
        self.likeliest = self.likeliest or likeliest
        if len(labels) != 1 or not same_weights(self.likeliest, likeliest):
            raise ValueError(f"{server.url} has other weights than {self._pool.servers[0].url}: expected the same")
        [label] = labels
        self._versions[label] = 0
        server.told = self._newest = Published(0, Path(), label, "model")

    def _greedy(self, server: _Server, ids: Sequence[int]) -> Answer:
        """The likeliest token after a few ids."""
        known = [each % self._vocabulary for each in ids]
        body = self._api.body(server.model, known, Sampling(1, temperature=0.0), 1, 0)
        response = self._pool.ask(server.url, self._api.path, body)
        if response.status_code != 200:
            raise ValueError(f"{response.url}: {response.status_code} {response.text[:500]}; {self._api.hint}")
        return self._api.parse(response, "model")

    def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Raise ValueError if a server's tokenizer is another one, as far as this text shows it, or is not told."""
        for server in self._servers.values():
            found = self._api.tokenizer_difference(self._ask(server.url), server.model, tokenizer, text)
            if found is not None:
                raise ValueError(f"{server.url} has another tokenizer than the student: {found}; expected the same")

    def _ask(self, url: str, patience: float | None = None) -> Ask:
        return lambda path, body: self._pool.ask(url, path, body, patience)

    def _call(self, request: GenerationRequest, kind: Kind) -> Call[Completion]:
        ids = request.prompt_ids
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._vocabulary:
            raise ValueError(
                f"completion {request.number}: its prompt has {len(ids)} tokens, expected at least one, each from 0 "
                f"to {self._vocabulary - 1}"
            )
        limit = self._sampling.max_new_tokens
        limit = limit if request.max_new_tokens is None else min(limit, request.max_new_tokens)
        attempt: list[tuple[_Server, Published]] = []

        def content(url: str) -> bytes:
            server = self._servers[url]
            # nothing is sent to a server while its weights are not known; between the choice of the server and this
            # line they may have become unknown, and the answer is then discarded
            told = server.told or _UNKNOWN
            attempt[:] = [(server, told)]
            model = told.label if told.kind == "adapter" else server.model
            body = self._api.body(model, ids.tolist(), self._sampling, limit, request.seed)
            return json.dumps(body).encode()

        def parse(response: httpx2.Response) -> Completion:
            return self._completion(response, *attempt[0], limit)

        return Call(
            self._api.path,
            content,
            _JSON,
            parse,
            len(ids) + limit,
            self._api.hint,
            frozenset({200, _LOST}) if kind == "adapter" else frozenset({200}),
        )

    def _completion(self, response: httpx2.Response, server: _Server, told: Published, limit: int) -> Completion:
        """Raises ValueError for a damaged answer, AskAgainError for one by weights that are not the student's."""
        if response.status_code == _LOST:
            self._restore(server, told)
            raise AskAgainError
        answer = self._api.parse(response, told.kind)
        count = len(answer.ids)
        versions_N = token_versions(answer.spans, self._versions, count)
        moved = not self._api.marks_tokens and server.told is not told
        if versions_N is None or versions_N.min() < told.version or told is _UNKNOWN or moved:
            self._restore(server, told)
            raise AskAgainError
        if (np.diff(versions_N) < 0).any():
            raise ValueError(f"the versions of a completion's tokens decrease: {versions_N.tolist()[:20]}")
        self._require_right(answer, limit)
        server.restored = 0
        found = _completion_of(answer, versions_N)
        # SGLang calls an end of sequence at the last possible token a cut
        return replace(found, finish="stop") if answer.ids[-1] in self._sampling.eos_ids else found

    def _require_right(self, answer: Answer, limit: int) -> None:
        """Raise ValueError for a completion that this server cannot have been asked for."""
        ids = answer.ids
        if not ids or len(ids) > limit:
            raise ValueError(f"a completion of {len(ids)} tokens: expected 1 to {limit}")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"the ids {min(ids)} to {max(ids)}: expected 0 to {self._vocabulary - 1}")
        ends = set(self._sampling.eos_ids)
        if ends & set(ids[:-1]):
            raise ValueError("a completion that goes on after its end of sequence")
        if answer.finish == "stop" and ids[-1] not in ends and answer.stop not in self._sampling.stop:
            raise ValueError(
                f"a completion that ends with token {ids[-1]} at {answer.stop!r}: expected the end of sequence "
                f"{sorted(ends)}, among its tokens, or one of the texts {list(self._sampling.stop)}"
            )

    def _give_all(self, servers: Sequence[_Server], patience: float) -> dict[str, UnreachableError]:
        """Give servers the newest version; returns the errors of those that have not answered."""
        absent: dict[str, UnreachableError] = {}
        with ThreadPoolExecutor(len(self._servers)) as threads:
            given = {each.url: threads.submit(self._give, each, patience) for each in servers}
        for url, each in given.items():
            error = each.exception()
            if isinstance(error, UnreachableError):
                absent[url] = error
            elif error is not None:
                raise error
        return absent

    def _give(self, server: _Server, patience: float) -> None:
        """Give a server the newest version, and prove that it has it. No request is sent to it meanwhile."""
        if not server.lock.acquire(timeout=patience):
            raise UnreachableError(f"{server.url} has not answered for {patience:g} seconds")
        try:
            ask, attempts = self._ask(server.url, patience), 0
            while (published := self._newest) is not None and not _has(server, published):
                self._pool.hold(server.url)
                server.told = None
                given = self._api.give(ask, published)
                if given and self._writes_with(ask, server, published):
                    server.told = replace(published)
                elif (attempts := attempts + 1) == MOST_RESTORED:
                    raise ServerError(_AGAIN.format(url=server.url))
            self._pool.release(server.url)
        finally:
            server.lock.release()

    def _writes_with(self, ask: Ask, server: _Server, published: Published) -> bool:
        """Whether the server writes with this version; False if it was started anew since it loaded it.

        Raises ServerError if it says so, and writes otherwise than another server with this version.
        """
        model = published.label if published.kind == "adapter" else server.model
        kinds, found = (probing(self._sampling), Sampling(1, temperature=0.0)), list[Completion]()
        bodies = [
            self._api.body(model, ids, sampling, sampling.max_new_tokens, seed)
            for seed, ids in enumerate(self._probes)
            for sampling in kinds
        ]
        with ThreadPoolExecutor(len(bodies)) as threads:  # a server computes what it gets together as one batch
            responses = list(threads.map(partial(ask, self._api.path), bodies))
        for response in responses:
            if response.status_code == _LOST and published.kind == "adapter":
                return False
            require(response, f"a completion with version {published.version}", self._api.hint)
            try:
                answer = self._api.parse(response, published.kind)
                if {each.label for each in answer.spans} != {published.label}:
                    return False
                found.append(_completion_of(answer, np.full(len(answer.ids), published.version, np.int32)))
            except ValueError as error:
                raise ServerError(f"{server.url} has loaded version {published.version}, but: {error}") from error
        tokens = [(int(each.ids_N[0]), float(each.log_probs_N[0])) for each in found[1::2]]
        probe, (proved, most) = Probe(published.label, tuple(found[::2]), tuple(tokens)), self._proved
        if proved.label == published.label and not same_weights(proved.likeliest, tokens, most):
            raise ServerError(
                f"{server.url} says that it has version {published.version}, and writes with other weights: "
                "expected a server that reads the folder that it is given, and loads all of it"
            )
        server.probe = probe
        return True

    def _restore(self, server: _Server, told: Published) -> None:
        """Begin to give a server the newest version, unless it was given one since the answer was asked for."""
        if not server.lock.acquire(blocking=False):
            return  # it is being given weights
        try:
            if server.told is not told:
                return
            server.told = None
            server.restored += 1
            self._pool.hold(server.url)
        finally:
            server.lock.release()
        if self.own_weights:
            error = ServerError(f"{server.url} has other weights than when the run began: restore them")
            self._warn(str(error))
            self._pool.give_up(server.url, error)
            return
        self._warn(f"the student's server {server.url} has other weights than it was given, and is given them again")
        self._restore_later(server)

    def _restore_later(self, server: _Server) -> None:
        """Give a server the newest version in the background, unless that is under way."""
        if not server.is_absent:
            server.is_absent = True
            threading.Thread(target=self._restored, args=(server,), daemon=True).start()

    def _restored(self, server: _Server) -> None:
        while True:
            wanted, failure = self._newest, None
            try:
                if server.restored > MOST_RESTORED:
                    raise ServerError(_AGAIN.format(url=server.url))
                self._give(server, self._timeout)
            except ServerError as error:
                failure = error
            if failure is None:
                server.is_absent = False
                if wanted is self._newest:
                    return
                server.is_absent = True  # `update_weights` may have passed it over
            elif wanted is self._newest:  # otherwise, what failed may have been removed for a newer version
                break
        server.is_absent = False  # the next version is tried again
        self._warn(f"the student's server {server.url} is given up: {failure}")
        self._pool.give_up(server.url, failure)

    def _top_log_probs(self, server: _Server, ids: Sequence[int], sampling: Sampling) -> list[float]:
        response = self._pool.ask(
            server.url, self._api.path, self._api.body(server.model, ids, sampling, 1, 0, top=MOST_LIKELY)
        )
        if response.status_code != 200:
            raise ValueError(
                f"{server.url}{self._api.path}: {response.status_code} {response.text[:500]}; {self._api.hint}"
            )
        return self._api.top_log_probs(response)


def _completion_of(answer: Answer, versions_N: np.ndarray) -> Completion:
    """Raises ValueError as `Completion` does."""
    return Completion(
        np.array(answer.ids, np.int32), np.array(answer.log_probs, np.float32), versions_N, answer.finish
    )


def _has(server: _Server, published: Published) -> bool:
    return server.told is not None and server.told.label == published.label


#: what a server has that was chosen before its weights became unknown
_UNKNOWN = Published(-1, Path(), "", "model")
