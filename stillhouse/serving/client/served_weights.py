"""Loads the newest weights on the servers that generate completions, and proves that the servers use them.

Every version has a label that only this engine uses. After a restart, a server has its initial weights and another
label. The answers of such a server are discarded, the requests are sent again, and the server gets the newest
version. The weights of a server can be proved only by its completions; a few short completions are enough.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stillhouse.config.servers import ServerError
from stillhouse.data.media import MediaProcessor
from stillhouse.rollout.engines import same_weights
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.pool import Ask, Server, ServerPool, UnreachableError
from stillhouse.serving.client.server_api import Answer, Published, ServerApi, require

#: seconds for which an update waits for an unreachable server, before the run continues with the other servers
PATIENCE = 10.0
#: the maximum number of times in a row that a server may answer with other weights than it should have
MAX_RESTORES = 10
#: the maximum number of tokens of a probe's completion
PROBE_TOKENS = 8
_AGAIN = (
    "other weights again and again: expected a server that does not restart repeatedly, and on which no other job "
    "loads weights"
)
_GREEDY = Sampling(1, temperature=0.0)
#: prompts. The log-probabilities of the next tokens identify a server's weights, and show some of its options
_PROMPTS = ((1,), (2, 3), (5, 7, 11), (13, 17, 19, 23), (29, 31, 37, 41, 43), (47, 53), (59, 61, 67), (71,))
#: the number of requested top tokens; the first is compared with the last, because their probabilities differ most
_TOP = 5
#: the smallest difference of log-probabilities, in nats, by which two options of a server can be distinguished
_LEAST_DIFFERENCE = 0.02

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Probe:
    """A server's completions of some prompts.

    label: the version of the weights that generated the completions.
    top_tokens: for each prompt, the most likely next token and its log-probability.
    """

    label: str = ""
    completions: tuple[Completion, ...] = ()
    top_tokens: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class ServerState:
    """The state of a server.

    address: the pool's object for this server. model: the name of the model in requests.
    published: the version that was loaded last; None while the weights are unknown. A new object means a new load.
    restored: how often the server had other weights since its last usable answer.
    is_absent: whether the newest version is being loaded in the background, because the server did not have it.
    probe: the probe of the version that was loaded last.
    """

    address: Server
    url: str
    model: str | None = None
    published: Published | None = None
    restored: int = 0
    is_absent: bool = False
    probe: Probe = field(default_factory=Probe)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(eq=False)
class ServedWeights:
    """The weights on servers.

    versions: version numbers by label. newest: the version that all servers should have.
    samplings: the samplings of all requests. keep: whether the servers keep their own weights.
    top_tokens: the top tokens after `_PROMPTS` if `keep` is true, otherwise empty.
    run_prefix: the beginning of the names of this run's adapters; "" if unknown. For the rest, see `ServedEngine`.
    """

    pool: ServerPool
    api: ServerApi
    processor: MediaProcessor | None
    samplings: Sequence[Sampling]
    vocabulary: int
    probes: Sequence[GenerationRequest]
    warn: Callable[[str], None]
    keep: bool
    update_timeout: float
    run_prefix: str = ""
    versions: dict[str, int] = field(default_factory=dict)
    newest: Published | None = None
    top_tokens: list[tuple[int, float]] = field(default_factory=list)
    #: the probe that was proved last, and the largest difference in nats that rounding can cause
    _proved: tuple[Probe, float] = (Probe(), 0.0)

    def __post_init__(self) -> None:
        self.servers = {server.url: ServerState(server, server.url) for server in self.pool.servers}
        self._prompts = [[token % self.vocabulary for token in prompt] for prompt in _PROMPTS]

    @property
    def probed(self) -> dict[str, tuple[Completion, ...]]:
        """The completions of the probes of each server that has the newest version, by server URL."""
        newest = self.newest and self.newest.label
        probes = {url: server.probe for url, server in self.servers.items()}
        return {url: probe.completions for url, probe in probes.items() if probe.label == newest}

    def set_proved(self, url: str, most: float) -> None:
        """Record that this server's probe is proved. `most`: the largest difference of later log-probabilities."""
        self._proved = self.servers[url].probe, most

    def connect(self) -> None:
        """Request the model name of each server. If `keep` is true, accept the servers' weights as version 0.

        Raises ValueError if a server cannot be used or, if `keep` is true, has other weights than the first server.
        """
        for server in self.servers.values():
            ask = self.pool.asker(server.url)
            if other := self.api.other_version(ask):
                self.warn(other)
            server.model = self.api.model_name(ask)
            if self.run_prefix and self.api.names_adapters:
                # drop the adapters of earlier processes of this run; other adapters' names begin differently
                earlier = [name for name in self.api.adapters(ask) if name.startswith(self.run_prefix)]
                for name in earlier:
                    self.api.forget(ask, name)
                if earlier and (left := set(earlier).intersection(self.api.adapters(ask))):
                    self.warn(
                        f"{server.url} keeps {len(left)} adapters of an earlier process of this run, which take its "
                        f"memory: {', '.join(sorted(left))}"
                    )
            if self.keep:
                self._keep_weights(server)
            elif self.api.kind.after_temperature:
                # log-probabilities do not depend on these fields, so one of several such samplings is enough
                parts = [replace(one, max_new_tokens=1, stop=(), eos_ids=()) for one in self.samplings]
                for sampling in dict.fromkeys(parts):
                    self._require_log_probs(server, sampling)

    def update_all(self, published: Published) -> None:
        """Load a version on all servers, as `ServedEngine.update_weights` describes."""
        assert not self.keep, "these servers keep their weights"
        before, end = self.newest, time.monotonic() + self.update_timeout
        self.versions[published.label], self.newest = published.version, published
        # a step must not wait again for a server that did not answer an earlier update
        present = [server for server in self.servers.values() if not server.is_absent]
        absent = self._update_servers(present, min(PATIENCE, self.pool.timeout), end)
        if len(absent) == len(present):
            absent = self._update_servers(list(self.servers.values()), self.pool.timeout, end)
            if len(absent) == len(self.servers):
                raise UnreachableError("; ".join(map(str, absent.values())))
        for url in absent:
            self._update_later(self.servers[url])
        self.forget(before)

    def adapter_of(self, published: Published) -> str | None:
        """The name of a version's adapter in requests; None if requests name no adapter."""
        return published.label if published.kind == "adapter" and self.api.names_adapters else None

    def restore(self, server: ServerState, published: Published) -> None:
        """Begin to load the newest version on a server. If `keep` is true, give the server up instead. Do nothing if
        the version of the server is no longer `published`, or while another thread loads weights on it.
        """
        if not server.lock.acquire(blocking=False):
            return  # another thread is loading weights on this server
        try:
            if server.published is not published:
                return
            server.published, server.restored = None, server.restored + 1
            server.address.hold()
        finally:
            server.lock.release()
        if self.keep:
            error = ServerError(f"{server.url} has other weights than when the run began: restore them")
            self.warn(str(error))
            server.address.hold(error)
        else:
            self.warn(
                f"the student's server {server.url} has other weights than the run has loaded: they are replaced"
            )
            self._update_later(server)

    def forget(self, published: Published | None, seconds: float = 0.0) -> None:
        """If this version is an adapter, let the servers drop it. Waits at most `seconds` for the servers."""

        def forget(url: str, adapter: str) -> None:
            with suppress(ServerError):  # a server that does not answer will be restarted, and then has no adapters
                self.api.forget(self.pool.asker(url, PATIENCE), adapter)

        if published is None or (adapter := self.adapter_of(published)) is None:
            return
        present = [url for url, server in self.servers.items() if not server.is_absent]
        # in threads, because a server may first finish completions
        threads = [threading.Thread(target=forget, args=(url, adapter), daemon=True) for url in present]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _keep_weights(self, server: ServerState) -> None:
        """Accept the server's weights as version 0. Raises ValueError if another server has other weights."""

        def parse(response: HttpAnswer) -> Answer:
            answer = self.api.parse(response)
            answer.require(_GREEDY, 1, self.vocabulary)
            return answer

        bodies = [self.api.body(server.model, prompt, _GREEDY, 1, 0) for prompt in self._prompts]
        answers = [self._one_token(server, body, parse) for body in bodies]
        labels = {span.label or "" for answer in answers for span in answer.spans}
        top_tokens = [(answer.ids[0], answer.log_probs[0]) for answer in answers]
        self.top_tokens = self.top_tokens or top_tokens
        if len(labels) != 1 or not same_weights(self.top_tokens, top_tokens):
            raise ValueError(f"{server.url} has other weights than {self.pool.servers[0].url}: expected the same")
        [label] = labels
        self.versions[label] = 0
        server.published = self.newest = Published(0, Path(), label, "model")

    def _one_token(self, server: ServerState, body: dict[str, Any], parse: Callable[[HttpAnswer], T]) -> T:
        """Request a completion of one token, and parse the answer. Raises ValueError if it cannot be read."""
        response = self.pool.asker(server.url)(self.api.path, body)
        if response.status != 200:
            raise ValueError(f"{response.url}: {response.status} {response.message}; {self.api.kind.hint}")
        try:
            return parse(response)
        except ValueError as error:
            raise ValueError(f"{response.url}: {error}") from error

    def _require_log_probs(self, server: ServerState, sampling: Sampling) -> None:
        """Raise ValueError unless the server's log-probabilities are computed after the temperature and over the full
        vocabulary, as training needs. This depends on options of a server that its answers do not show.

        The gap between the first and the last top token must be the gap at temperature 1, divided by the temperature.
        With top_k=2, the first log-probability is too large if the server normalises over only two tokens.
        """
        temperature, kind = sampling.temperature, self.api.kind
        if temperature == 0 or (temperature == 1 and sampling.samples_all_tokens):
            return

        def top(prompt: Sequence[int], sampling: Sampling, count: int = _TOP) -> list[float]:
            body = self.api.body(server.model, prompt, sampling, 1, 0, top=_TOP)
            log_probs = self._one_token(server, body, self.api.top_log_probs)[:count]
            if len(log_probs) < 2 or not all(map(math.isfinite, log_probs)):
                raise ValueError(
                    f"{server.url} gives {log_probs} for the top tokens: expected at least two finite numbers"
                )
            return log_probs

        for prompt in self._prompts:
            before, after = top(prompt, Sampling(1)), top(prompt, Sampling(1, temperature=temperature))
            if temperature != 1:
                gap, scaled_gap = before[0] - before[-1], after[0] - after[-1]
                if abs(gap / temperature - gap) < _LEAST_DIFFERENCE:
                    continue
                if abs(scaled_gap - gap) < abs(scaled_gap - gap / temperature):
                    raise ValueError(
                        f"{server.url} computes log-probabilities before the temperature, and the temperature is "
                        f"{temperature:g}: expected {kind.after_temperature}, or a temperature of 1"
                    )
            if not sampling.samples_all_tokens:
                among_two = -math.log1p(math.exp((before[1] - before[0]) / temperature))
                if abs(among_two - after[0]) < _LEAST_DIFFERENCE:
                    continue
                cut = top(prompt, Sampling(1, temperature=temperature, top_k=2), 2)[0]
                if abs(cut - among_two) < abs(cut - after[0]):
                    at_one = kind.over_all_tokens and f", or for a temperature of 1 {kind.over_all_tokens}"
                    raise ValueError(
                        f"{server.url} gives log-probabilities among the tokens that top_p, top_k and min_p leave, "
                        "and training needs those over the whole vocabulary: expected top_p=1, top_k=0 and "
                        f"min_p=0{at_one}"
                    )
            return
        raise ValueError(
            f"{server.url} gives its top tokens nearly the same probability, or one of them the probability 1, so "
            "that its kind of log-probabilities cannot be proved: expected a trained model, or temperature=1, "
            "top_p=1, top_k=0 and min_p=0"
        )

    def _update_servers(
        self, servers: Sequence[ServerState], patience: float, end: float
    ) -> dict[str, UnreachableError]:
        """Load the newest version on servers; return the errors of the servers that have not answered, by URL.

        end: the time limit. A server that loads the version later counts as not answering, but its thread continues.
        """
        absent: dict[str, UnreachableError] = {}
        threads = ThreadPoolExecutor(len(self.servers))
        futures = {server.url: threads.submit(self._update, server, patience) for server in servers}
        threads.shutdown(wait=False)
        wait(futures.values(), min(max(0.0, end - time.monotonic()), threading.TIMEOUT_MAX))
        assert self.newest is not None
        for url, future in futures.items():
            late = UnreachableError(
                f"{url} has not loaded version {self.newest.version} of the weights within {self.update_timeout:g} s "
                "(train.timeout)"
            )
            error = future.exception() if future.done() else late
            if isinstance(error, UnreachableError):
                absent[url] = error
            elif error is not None:
                raise error
        return absent

    def _update(self, server: ServerState, patience: float) -> None:
        """Load the newest version on a server, and prove that it is in use. The server gets no requests meanwhile."""
        if not server.lock.acquire(timeout=patience):
            raise UnreachableError(f"{server.url} has not answered for {patience:g} seconds")
        try:
            ask, attempts = self.pool.asker(server.url, patience), 0
            while (published := self.newest) is not None:
                if server.published is not None and server.published.label == published.label:
                    break
                server.address.hold()
                server.published = None
                if self.api.load_weights(ask, published) and self._writes_with(ask, server, published):
                    server.published = replace(published)
                elif (attempts := attempts + 1) == MAX_RESTORES:
                    raise ServerError(f"{server.url} has {_AGAIN}")
            server.address.release()
        finally:
            server.lock.release()

    def _writes_with(self, ask: Ask, server: ServerState, published: Published) -> bool:
        """Send the probes to a server, and return whether it generates with this version. False means that the server
        was restarted, or got other weights, after it had loaded the version.

        Raises ServerError if the server reports this version, but gives other top tokens than the proved server.
        """
        completions: list[Completion] = []
        adapter = self.adapter_of(published)
        model = adapter or server.model
        # with temperature 1 and all tokens, the server's options do not change the log-probabilities. Greedy sampling
        # alone would prove less, because the probability of a top token is often nearly 1 for any weights
        first = self.samplings[0]
        samplings = (Sampling(min(PROBE_TOKENS, first.max_new_tokens), eos_ids=first.eos_ids), _GREEDY)
        pairs = list(product([replace(probe, seed=seed) for seed, probe in enumerate(self.probes)], samplings))
        bodies = [self.api.request_body(model, *pair, pair[1].max_new_tokens, self.processor) for pair in pairs]
        with ThreadPoolExecutor(len(bodies)) as threads:  # the server computes concurrent requests as one batch
            responses = list(threads.map(partial(ask, self.api.path), bodies))
        for response, (_, sampling) in zip(responses, pairs, strict=True):
            if adapter is not None and self.api.lacks_adapter(response):
                return False
            require(response, f"a completion with version {published.version}", self.api.kind.hint)
            try:
                answer = self.api.parse(response, adapter)
                answer.require(sampling, sampling.max_new_tokens, self.vocabulary)
                if {span.label for span in answer.spans} != {published.label}:
                    return False
                completions.append(answer.completion(np.full(len(answer.ids), published.version, np.int32)))
            except ValueError as error:
                raise ServerError(f"{server.url} has loaded version {published.version}, but: {error}") from error
        sampled, greedy = tuple(completions[::2]), completions[1::2]
        top_tokens = tuple((int(one.ids_N[0]), float(one.log_probs_N[0])) for one in greedy)
        proved, most = self._proved
        if proved.label == published.label and not same_weights(proved.top_tokens, top_tokens, most):
            raise ServerError(
                f"{server.url} says that it has version {published.version}, but generates with other weights: "
                "expected a server that loads all weights from the folder that it is given"
            )
        server.probe = Probe(published.label, sampled, top_tokens)
        return True

    def _update_later(self, server: ServerState) -> None:
        """Load the newest version on a server in the background. If that fails, give the server up."""

        def update() -> None:
            failure: ServerError | None = None
            wanted = self.newest
            try:
                if server.restored > MAX_RESTORES:
                    raise ServerError(f"{server.url} has {_AGAIN}")
                end = time.monotonic() + self.update_timeout
                failure = self._update_servers([server], self.pool.timeout, end).get(server.url)
            except ServerError as error:
                failure = error
            server.is_absent = False
            if wanted is not self.newest:  # meanwhile, `update_all` has skipped this server with a newer version
                self._update_later(server)
            elif failure is not None:
                self.warn(f"the student's server {server.url} is given up: {failure}")
                server.address.hold(failure)

        if not server.is_absent:
            server.is_absent = True
            threading.Thread(target=update, daemon=True).start()
