"""Engines that generate completions: their interfaces, and the engine that generates in the job's own processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from stillhouse.models import Decoder, ProofError, prove_decoder
from stillhouse.parallel import ONE_PROCESS, DistributedStudent
from stillhouse.parallel.ranks import EarlyMessages
from stillhouse.parallel.sharded_loading import allocate
from stillhouse.rollout.generate import Generator
from stillhouse.rollout.records import Completion, CompletionReceiver, GenerationRequest, Inbox, Sampling

#: the number of completions with which the weights of a server are proved
PROBES = 4
#: the largest difference of log-probabilities that rounding in bfloat16 causes
ROUNDED = 0.1


class RolloutEngine(Protocol):
    """Generates completions with the student's weights, and takes new weights."""

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


class RolloutServers(RolloutEngine, Protocol):
    """Servers that generate completions; only the first rank has them."""

    def generate(self, requests: Sequence[GenerationRequest], inbox: Inbox | None = None) -> list[Future[Completion]]:
        """Request completions, and return at once.

        A future raises ServerError if no server answers in time, and ValueError if an answer is invalid.

        inbox: gets the completions and the errors of the futures.
        """
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


class RemoteEngine(RolloutServers, Protocol):
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


class Requester(Protocol):
    """Has the requests for completions, turn by turn. inbox: gets the completions."""

    inbox: Inbox

    def next_requests(self) -> list[GenerationRequest]:
        """Wait until completions are needed, and return their requests; [] after the last ones."""
        ...


class JobEngine(Protocol):
    """Generates completions for all ranks together."""

    def complete(self, requester: Requester | None, *kinds: type[BaseException]) -> None:
        """Generate all completions that a requester of the first rank needs; all ranks must call this.

        kinds: errors of `next_requests` that all ranks raise.
        """
        ...


class InJobEngine:
    """Generates in this job, in one process or on all ranks.

    Each rank generates some of the batches, and every rank gets all completions. Except for rounding, the completions
    do not depend on the number of ranks.

    copy: the full copy of a sharded student; its decoder must be the generator's. None: the student is not sharded.
    """

    def __init__(self, generator: Generator, copy: "StudentCopy | None" = None, version: int = 0):
        assert copy is None or copy.decoder is generator.decoder, "the generator needs the copy's decoder"
        self.generator, self.version, self._copy = generator, version, copy
        self._ranks = ONE_PROCESS if copy is None else copy.mesh.ranks
        self._is_alone = self._ranks.size == 1

    def with_sampling(self, sampling: Sampling) -> "InJobEngine":
        """Return an engine with the same weights, also after `update_weights` of this one, and other sampling."""
        return InJobEngine(self.generator.with_sampling(sampling), self._copy, self.version)

    def complete(self, requester: Requester | None, *kinds: type[BaseException]) -> None:
        """See `JobEngine.complete`. All ranks also raise the ValueError of `generate`."""
        if self._is_alone:
            assert requester is not None
            while requests := requester.next_requests():
                self.generate(requests, requester.inbox)
            return
        while True:
            with self._ranks.shared(*kinds) as shared:
                if requester is not None:
                    contents = [request.as_json() for request in requester.next_requests()]
                    shared.value = contents, f"completions {uuid4().hex}" if requester.inbox.is_early else None
            contents, box = shared.value
            if not contents:
                return
            requests = [GenerationRequest.from_json(values) for values in contents]
            self.generate(requests, None if requester is None else requester.inbox, box)

    def generate(
        self, requests: Sequence[GenerationRequest], inbox: Inbox | None = None, box: str | None = None
    ) -> list[Completion]:
        """Generate completions. All ranks must call this with the same requests.

        inbox: of the first rank; gets all completions, each as soon as it has ended if the inbox `is_early`.
        box: of the other ranks' messages about completions that have ended; see `EarlyMessages`.

        If one rank fails, all ranks raise the ValueError of `Generator.generate`.
        """
        early: CompletionReceiver | None = inbox if inbox is not None and inbox.is_early else None
        if self._is_alone:
            completions = self.generator.generate(requests, self.version, early)
        else:
            completions = self._generate_on_ranks(requests, early, box)
        if inbox is not None:
            for request, completion in zip(requests, completions, strict=True):
                inbox.put((request.number, completion))
        return completions

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on; all ranks must call this. `folder` has no effect."""
        if self._copy is not None:
            self._copy.refresh()
        self.version = version

    def close(self) -> None:
        """Do nothing: no request is under way after `generate` has returned."""

    def _generate_on_ranks(
        self, requests: Sequence[GenerationRequest], early: CompletionReceiver | None, box: str | None
    ) -> list[Completion]:
        self.generator.check(requests)
        batches = self._ranks.share(self.generator.batches(requests, least=self._ranks.size))
        receiver = early if box is None or early is not None else _FirstRank(self._messages, box)

        def generate_share() -> list[Any]:
            pairs: list[Any] = []
            for batch in batches:
                completions = self.generator.batch([requests[at] for at in batch], self.version, early=receiver)
                pairs += [[at, completion.as_json()] for at, completion in zip(batch, completions, strict=True)]
            return pairs

        others = len(requests) - sum(map(len, batches))
        receives = None if box is None or early is None else self._messages.received(box, others, early.put)
        with receives or nullcontext():
            pairs_of_ranks = self._ranks.gather_results(generate_share, ValueError)
        by_number = dict(pair for pairs in pairs_of_ranks for pair in pairs)
        return [Completion.from_json(by_number[at]) for at in range(len(requests))]

    @cached_property
    def _messages(self) -> EarlyMessages:
        return EarlyMessages()


class _FirstRank:
    """Sends completions to the first rank while the other ranks still generate."""

    def __init__(self, messages: EarlyMessages, box: str):
        self._messages, self._box = messages, box

    def put(self, content: tuple[int, Completion]) -> None:
        number, completion = content
        self._messages.send(self._box, [number, completion.as_json()])


class StudentCopy:
    """A full copy of a sharded student on each rank, for generation. All ranks must create it together.

    transformers' `generate` needs a full model, but a rank has only a shard of the student. So each rank also keeps
    a full copy in the student's dtype on its device, which needs enough memory for both.

    build: returns the full student as `ModelSource.build` does, with arbitrary weights or on the meta device.

    Raises ValueError if no rank has a tensor of the copy, and ProofError if the copy's results are wrong.
    """

    def __init__(self, student: DistributedStudent, build: Callable[[], Decoder]):
        self._student, self.mesh = student, student.mesh
        self.decoder = build()
        if next(self.decoder.parameters()).is_meta:
            allocate(self.decoder, self.mesh.device)
        self.decoder.to(self.mesh.device).eval()
        trained = {
            name
            for part in student.decoders
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        self._owners = self._find_owners()
        trained_of_ranks = self.mesh.ranks.gather(sorted(trained))
        self._trained = {name for names in trained_of_ranks for name in names}
        self.decoder.requires_grad_(False)
        self._copy(self._owners)
        with self.mesh.ranks.all_raise(ProofError):
            prove_decoder(self.decoder)

    def refresh(self) -> None:
        """Copy the student's trained weights, one tensor at a time; all ranks must call this.

        Frozen weights, such as the base weights of an adapter, were copied when this object was created.
        """
        self._copy({name: owner for name, owner in self._owners.items() if name in self._trained})

    @torch.no_grad()
    def _copy(self, owners: dict[str, int]) -> None:
        held = self._student.stage_weights()
        here = self.mesh.weights.get_local_rank("pipeline")
        group = self.mesh.weights.get_group("pipeline")
        weights = self.decoder.state_dict()
        for name, owner in owners.items():
            value = held[name].gather().contiguous() if owner == here else torch.empty_like(weights[name])
            if group.size() > 1:
                dist.broadcast(value, group=group, group_src=owner)
            weights[name].copy_(value)

    def _find_owners(self) -> dict[str, int]:
        """For each tensor of the copy, the first coordinate on the pipeline axis whose ranks have it."""
        stage_and_names = self.mesh.weights.get_local_rank("pipeline"), sorted(self._student.stage_weights())
        owners: dict[str, int] = {}
        for coordinate, names in sorted(self.mesh.ranks.gather(stage_and_names)):
            for name in names:
                owners.setdefault(name, coordinate)
        wanted = list(self.decoder.state_dict())
        if missing := [name for name in wanted if name not in owners]:
            raise ValueError(f"no rank holds the student's tensor '{missing[0]}': expected a copy of the same model")
        return {name: owners[name] for name in wanted}
