"""Engines that generate completions: their interface, and the engine that generates in the job's own processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from stillhouse.parallel import ONE_PROCESS, EarlyMessages
from stillhouse.rollout.generate import Generator, at_positions
from stillhouse.rollout.records import Completion, Ended, GenerationRequest, Sampling
from stillhouse.rollout.student_copy import StudentCopy

Result = TypeVar("Result")

#: the number of completions with which the weights of a server are proved
PROBES = 4
#: the largest difference of log-probabilities that rounding in bfloat16 causes
ROUNDED = 0.1
_GENERATE, _BOX = "generate", "box"


class RolloutEngine(Protocol):
    """Generates completions with the student's weights, and takes new weights."""

    def generate(self, requests: Sequence[GenerationRequest], ended: Ended | None = None) -> list[Future[Completion]]:
        """Start generation; returns one future per request without waiting for servers.

        An engine in this process generates the completions before it returns. A future raises ServerError if no
        server answers in time, and ValueError if an answer is invalid.

        ended: called for completions that end before this method returns, while others are still generated, in this
            or another thread. Not every engine calls it; the futures tell of all completions.
        """
        ...

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on. version: the number of these weights.

        No forward pass mixes two versions. Requests that are under way continue with the new weights; the version is
        recorded per token.

        folder: where the weights have been published; None if the engine generates with the student in memory.
        """
        ...

    def close(self) -> None:
        """Cancel the requests that are under way."""
        ...


class RemoteWeights(Protocol):
    """The weights of the servers of a `RemoteEngine`.

    top_tokens: after each of some fixed prompts, the top token and its log-probability.
    probed: by server, the completions of the probes with the version that was loaded last.
    """

    @property
    def top_tokens(self) -> Sequence[tuple[int, float]]: ...
    @property
    def probed(self) -> Mapping[str, Sequence[Completion]]: ...
    def set_proved(self, url: str, most: float) -> None:
        """Record that a server's probe comes from the trainer's weights. most: the largest difference in nats."""


class RemoteEngine(RolloutEngine, Protocol):
    """An engine on servers, such as `serving/` has. They load published weights, or keep their own."""

    @property
    def weights(self) -> RemoteWeights: ...
    def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Raise ValueError if a server does not report its tokenizer, or if its tokens of this text differ."""


def same_weights(
    before: Sequence[tuple[int, float]], now: Sequence[tuple[int, float]], most: float = ROUNDED
) -> bool:
    """Whether the top tokens after the same prompts can come from the same weights, except for rounding.

    More than half of the ids must be equal (not all, because two tokens may be almost equally likely), and the
    log-probabilities of equal ids must differ by less than `most` nats.
    """
    gaps = [abs(one[1] - other[1]) for one, other in zip(before, now, strict=False) if one[0] == other[0]]
    return len(before) == len(now) and 2 * len(gaps) > len(now) and all(gap < most for gap in gaps)


class InJobEngine:
    """Generates in this job, in one process or on all ranks; its futures are done when `generate` returns.

    Each rank generates some of the batches, and every rank gets all completions. Except for rounding, the completions
    do not depend on the number of ranks.

    Only the first rank has the queue of samples, the rewards and the environment, and requests completions. The other
    ranks receive these requests while they wait in `lead` for the first rank's result.

    copy: the full copy of a sharded student; its decoder must be the generator's. None: the student is not sharded.
    """

    def __init__(self, generator: Generator, copy: StudentCopy | None = None, version: int = 0):
        assert copy is None or copy.decoder is generator.decoder, "the generator needs the copy's decoder"
        self.generator, self.version, self._copy = generator, version, copy
        self._ranks = ONE_PROCESS if copy is None else copy.mesh.ranks
        self._is_leading = False

    def with_sampling(self, sampling: Sampling) -> "InJobEngine":
        """Return an engine with the same weights, also after `update_weights` of this one, and other sampling."""
        return InJobEngine(self.generator.with_sampling(sampling), self._copy, self.version)

    def lead(self, function: Callable[[], Result], *kinds: type[BaseException]) -> Result:
        """Call a function on the first rank and return its result on all ranks, as `Ranks.on_first` does.

        If the function requests completions from this engine, all ranks generate them together.
        """
        if self._ranks.is_first:
            self._is_leading = True
            try:
                return self._ranks.on_first(function, *kinds)
            finally:
                self._is_leading = False
        message = self._ranks.from_first(None)
        while _GENERATE in message:
            # an error on one rank is raised on all ranks; only the first rank reports it
            with suppress(ValueError):
                requests = [GenerationRequest.from_json(values) for values in message[_GENERATE]]
                self._generate(requests, None if message[_BOX] is None else partial(self._tell, message[_BOX]))
            message = self._ranks.from_first(None)
        return self._ranks.outcome(message, *kinds)

    def generate(self, requests: Sequence[GenerationRequest], ended: Ended | None = None) -> list[Future[Completion]]:
        """Generate completions. If one rank fails, all ranks raise the ValueError of `Generator.generate`.

        Within `lead`, only the first rank calls this, and `ended` is also called for completions of the other ranks,
        in another thread. Outside `lead`, all ranks call it with the same requests, and `ended` is called for those
        that this rank generates.
        """
        box: str | None = None
        if self._is_leading:
            box = None if ended is None or self._ranks.size == 1 else f"completions {uuid4().hex}"
            self._ranks.from_first({_GENERATE: [request.as_json() for request in requests], _BOX: box})
        return [_done(completion) for completion in self._generate(requests, ended, box)]

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on; all ranks must call this. `folder` has no effect."""
        if self._copy is not None:
            self._copy.refresh()
        self.version = version

    def close(self) -> None:
        """Do nothing: no request is under way after `generate` has returned."""

    def _generate(
        self, requests: Sequence[GenerationRequest], ended: Ended | None = None, box: str | None = None
    ) -> list[Completion]:
        """box: on the first rank, that of messages about the other ranks' completions; see `EarlyMessages`."""
        if self._ranks.size == 1:
            return self.generator.generate(requests, self.version, ended)
        self.generator.check(requests)
        batches = self._ranks.share(self.generator.batches(requests, least=self._ranks.size))

        def generate_share() -> list[Any]:
            return [pair for batch in batches for pair in self._numbered(requests, batch, ended)]

        others = len(requests) - sum(map(len, batches))
        with nullcontext() if box is None else self._messages.received(box, others, _pass_on(ended)):
            of_ranks = self._ranks.gather_results(generate_share, ValueError)
        by_number = dict(pair for of_rank in of_ranks for pair in of_rank)
        return [Completion.from_json(by_number[at]) for at in range(len(requests))]

    def _tell(self, box: str, at: int, completion: Completion) -> None:
        self._messages.send(box, [at, completion.as_json()])

    @cached_property
    def _messages(self) -> EarlyMessages:
        return EarlyMessages()

    def _numbered(
        self, requests: Sequence[GenerationRequest], batch: Sequence[int], ended: Ended | None
    ) -> list[Any]:
        """Generate a batch; returns pairs of a request's position in `requests` and its completion as JSON."""
        of_batch = [requests[at] for at in batch]
        completions = self.generator.batch(of_batch, self.version, ended=at_positions(ended, batch))
        return [[at, completion.as_json()] for at, completion in zip(batch, completions, strict=True)]


def _pass_on(ended: Ended | None) -> Callable[[Sequence[Any]], None]:
    """Return a function that calls `ended` with the contents of a message."""
    assert ended is not None
    return lambda message: ended(message[0], Completion.from_json(message[1]))


def _done(completion: Completion) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_result(completion)
    return future
