"""The engine that writes completions on all ranks of a job, with the interface of the engine in one process.

The first rank has the queue of samples, the rewards and the environment, and asks for completions as it needs them.
The other ranks learn of its requests while they wait for the result of what it does (`lead`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from stillhouse.generation.generate import Generator
from stillhouse.generation.in_process import InProcessEngine, done
from stillhouse.generation.sample import Completion, GenerationRequest
from stillhouse.generation.student_copy import StudentCopy

Result = TypeVar("Result")

_GENERATE = "generate"


class DistributedEngine(InProcessEngine):
    """Each rank writes some of the batches, and every rank gets all completions. They are those of one process, but
    for rounding where other requests share a batch.

    copy: the copy of the student whose decoder the generator has.
    """

    def __init__(self, generator: Generator, copy: StudentCopy):
        assert copy.decoder is generator.decoder, "the generator needs the copy's decoder"
        super().__init__(generator)
        self._copy, self._ranks = copy, copy.mesh.ranks
        self._is_leading = False

    def lead(self, function: Callable[[], Result], *kinds: type[BaseException]) -> Result:
        """The result of a function of the first rank on all ranks, as `Ranks.on_first`.

        What the function asks this engine for on the first rank, all ranks write.
        """
        if self._ranks.is_first:
            self._is_leading = True
            try:
                return self._ranks.on_first(function, *kinds)
            finally:
                self._is_leading = False
        message = self._ranks.from_first(None)
        while _GENERATE in message:
            # if a rank cannot, all ranks get the error, and the first one tells it
            with suppress(ValueError):
                self._write([GenerationRequest.from_json(values) for values in message[_GENERATE]])
            message = self._ranks.from_first(None)
        return self._ranks.outcome(message, *kinds)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """The completions. Raises ValueError as `Generator.generate` does; if one rank does, on all ranks.

        Within `lead`, the first rank alone calls this; otherwise all ranks, with the same requests.
        """
        if self._is_leading:
            self._ranks.from_first({_GENERATE: [request.as_json() for request in requests]})
        return [done(completion) for completion in self._write(requests)]

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on: a collective of all ranks. folder: has no effect."""
        self._copy.refresh()
        self.version = version

    def _write(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.generator.check(requests)
        batches = self._ranks.share(self.generator.batches(requests, least=self._ranks.size))

        def generate_share() -> list[Any]:
            return [pair for batch in batches for pair in self._numbered(requests, batch)]

        of_ranks = self._ranks.gather_results(generate_share, ValueError)
        by_number = dict(pair for of_rank in of_ranks for pair in of_rank)
        return [Completion.from_json(by_number[at]) for at in range(len(requests))]

    def _numbered(self, requests: Sequence[GenerationRequest], batch: Sequence[int]) -> list[Any]:
        """The numbers of a batch's requests, each with its completion as JSON."""
        completions = self.generator.batch([requests[at] for at in batch], self.version)
        return [[at, completion.as_json()] for at, completion in zip(batch, completions, strict=True)]
