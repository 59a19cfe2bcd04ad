"""Engines that generate completions: their interfaces, and the engine that generates in the processes of this job."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from stillhouse.models import Decoder, ProofError, prove_decoder
from stillhouse.parallel import ONE_PROCESS, DistributedStudent
from stillhouse.parallel.ranks import EarlyMessages
from stillhouse.parallel.sharded_loading import allocate
from stillhouse.rollout.generate import Generator
from stillhouse.rollout.records import Completion, CompletionCallback, CompletionInbox, GenerationRequest
from stillhouse.rollout.samples import Samples

#: the number of completions by which a server proves that it has the trainer's weights
PROBES = 4
#: the largest difference of log-probabilities, in nats, that can come from rounding in bfloat16
ROUNDED = 0.1


class RemoteWeights(Protocol):
    """The weights of the servers of a `RemoteEngine`.

    top_tokens: the top token and its log-probability after each of some fixed prompts.
    probed: by URL, the server's completions of the probe requests, generated with the weights that it loaded last.
    """

    @property
    def top_tokens(self) -> Sequence[tuple[int, float]]: ...
    @property
    def probed(self) -> Mapping[str, Sequence[Completion]]: ...
    def set_proved(self, url: str, most: float) -> None:
        """Record that the completions of a server's probe come from the trainer's weights.

        most: the largest difference between the log-probabilities of the server and of the trainer, in nats.
        """


class RemoteEngine(Protocol):
    """Servers that generate completions with published weights, or with weights of their own. Only the first rank has
    this object.
    """

    @property
    def weights(self) -> RemoteWeights: ...
    def require_tokenizer(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        """Raise ValueError if a server does not report its tokenizer, or if it tokenizes `text` differently."""

    def generate(
        self, requests: Sequence[GenerationRequest], inbox: CompletionInbox | None = None
    ) -> list[Future[Completion]]:
        """Request completions, and return their futures at once. inbox: gets the completions and the errors of the
        futures. A future raises ServerError if no server answers in time, and ValueError if an answer is invalid.
        """
        ...

    def update_weights(self, version: int, folder: Path) -> None:
        """Use the weights that have been published in `folder` as this version. No forward pass mixes two versions.
        Open requests continue with the new weights; each token records the version that generated it.
        """
        ...

    def close(self) -> None:
        """Cancel open requests."""
        ...


def same_weights(
    before: Sequence[tuple[int, float]], now: Sequence[tuple[int, float]], most: float = ROUNDED
) -> bool:
    """Whether the top tokens after the same prompts can come from the same weights, except for rounding.

    It is enough that more than half of the ids are equal, because rounding can swap two tokens with almost equal
    probabilities. The log-probabilities of equal ids must differ by less than `most` nats.

    before, now: pairs of a top token and its log-probability.
    """
    gaps = [abs(one[1] - other[1]) for one, other in zip(before, now, strict=False) if one[0] == other[0]]
    return len(before) == len(now) and 2 * len(gaps) > len(now) and all(gap < most for gap in gaps)


class JobEngine(Protocol):
    """Generates completions for all ranks together."""

    def complete(self, samples: Samples | None, *kinds: type[BaseException]) -> None:
        """Generate all completions that the samples of the first rank need. All ranks must call this method.

        samples: the samples on the first rank, None on all other ranks.
        kinds: the errors of `Samples.next_requests` that all ranks raise.
        """


class InJobEngine:
    """Generates in this job. Each rank generates some of the batches, and every rank gets all completions.

    Except for rounding, the completions do not depend on the number of ranks.

    copy: the full copy of a sharded student, with the decoder of `generator`; None if the student is not sharded.
    """

    def __init__(self, generator: Generator, copy: "StudentCopy | None" = None, version: int = 0):
        assert copy is None or copy.decoder is generator.decoder, "the generator needs the copy's decoder"
        self.generator, self.version, self._copy = generator, version, copy
        self._ranks = ONE_PROCESS if copy is None else copy.mesh.ranks
        self._is_single_process = self._ranks.size == 1

    def complete(self, samples: Samples | None, *kinds: type[BaseException]) -> None:
        """See `JobEngine.complete`. All ranks also raise the ValueError of `InJobEngine.generate`."""
        if self._is_single_process:
            assert samples is not None
            while requests := samples.next_requests():
                self.generate(requests, samples.inbox)
            return
        while True:
            with self._ranks.shared(*kinds) as shared:
                if samples is not None:
                    contents = [request.as_json() for request in samples.next_requests()]
                    shared.value = contents, f"completions {uuid4().hex}" if samples.inbox.is_early else None
            contents, box = shared.value
            if not contents:
                return
            requests = [GenerationRequest.from_json(values) for values in contents]
            self.generate(requests, None if samples is None else samples.inbox, box)

    def generate(
        self, requests: Sequence[GenerationRequest], inbox: CompletionInbox | None = None, box: str | None = None
    ) -> list[Completion]:
        """Generate completions. All ranks must call this with the same requests. If one rank fails, all ranks raise
        its error.

        inbox: the first rank's inbox, which gets all completions. If the inbox `is_early`, it gets each completion as
            soon as this completion ends.
        box: the name under which the other ranks send each completion as soon as it ends; see `EarlyMessages`.
        """
        early: CompletionCallback | None = inbox.put if inbox is not None and inbox.is_early else None
        if self._is_single_process:
            completions = self.generator.generate(requests, self.version, early)
        else:
            self.generator.check(requests)
            batches = self._ranks.share(self.generator.batches(requests, least=self._ranks.size))
            receives: AbstractContextManager[object] = nullcontext()
            if box is not None and early is not None:  # this is the first rank
                others = len(requests) - sum(map(len, batches))
                receives = self._messages.received(box, others, early)
            elif box is not None:
                early = partial(self._send, box)
            with receives, self._ranks.all_raise(ValueError) as pairs:
                for batch in batches:
                    completions = self.generator.batch([requests[at] for at in batch], self.version, early=early)
                    pairs += [[at, completion.as_json()] for at, completion in zip(batch, completions, strict=True)]
            by_number = dict(pairs)
            completions = [Completion.from_json(by_number[at]) for at in range(len(requests))]
        if inbox is not None:
            for request, completion in zip(requests, completions, strict=True):
                inbox.put((request.number, completion))
        return completions

    def update_weights(self, version: int) -> None:
        """Use the student's present weights from now on; all ranks must call this. version: the weights' version."""
        if self._copy is not None:
            self._copy.refresh()
        self.version = version

    def _send(self, box: str, content: tuple[int, Completion]) -> None:
        self._messages.send(box, [content[0], content[1].as_json()])

    @cached_property
    def _messages(self) -> EarlyMessages:
        return EarlyMessages()


class StudentCopy:
    """A full copy of a sharded student on each rank, because transformers' `generate` needs a full model.

    All ranks must create the copy together. The copy has the student's dtype and device.

    build: returns the full student as `ModelSource.build` does, with arbitrary weights or on the meta device.

    Raises ValueError if the copy has a tensor that the student lacks, and ProofError if the copy's results are wrong.
    """

    def __init__(self, student: DistributedStudent, build: Callable[[], Decoder]):
        self._student, self.mesh = student, student.mesh
        self.decoder = build()
        if next(self.decoder.parameters()).is_meta:
            allocate(self.decoder, self.mesh.device)
        self.decoder.to(self.mesh.device).eval()
        parameters = [named for part in student.decoders for named in part.named_parameters()]
        trained = sorted({name for name, parameter in parameters if parameter.requires_grad})
        stage_and_names = self.mesh.weights.get_local_rank("pipeline"), sorted(student.stage_weights())
        owners: dict[str, int] = {}
        for coordinate, names in sorted(self.mesh.ranks.gather(stage_and_names)):
            for name in names:
                owners.setdefault(name, coordinate)
        wanted = list(self.decoder.state_dict())
        if missing := [name for name in wanted if name not in owners]:
            raise ValueError(
                f"the copy has the tensor '{missing[0]}', which no rank of the student has: expected the same model"
            )
        #: for each tensor of the copy, the first coordinate on the pipeline axis whose ranks have it
        self._owners = {name: owners[name] for name in wanted}
        self._trained = {name for names in self.mesh.ranks.gather(trained) for name in names}
        self.decoder.requires_grad_(False)
        self.refresh(with_frozen=True)
        with self.mesh.ranks.all_raise(ProofError):
            prove_decoder(self.decoder)

    @torch.no_grad()
    def refresh(self, *, with_frozen: bool = False) -> None:
        """Copy the trained weights, one tensor at a time; all ranks must call this.

        with_frozen: also copy frozen weights.
        """
        held = self._student.stage_weights()
        here = self.mesh.weights.get_local_rank("pipeline")
        group = self.mesh.weights.get_group("pipeline")
        weights = self.decoder.state_dict()
        for name, owner in self._owners.items():
            if not with_frozen and name not in self._trained:
                continue
            value = held[name].gather().contiguous() if owner == here else torch.empty_like(weights[name])
            if group.size() > 1:
                dist.broadcast(value, group=group, group_src=owner)
            weights[name].copy_(value)
