"""The engine that writes completions in the processes of the job itself (see `RolloutEngine`)."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from stillhouse.generation.generate import Generator
from stillhouse.generation.sample import Completion, GenerationRequest
from stillhouse.generation.student_copy import StudentCopy


class InProcessEngine:
    """Writes completions with a generator; its futures are done when `generate` returns.

    version: of the present weights. copy: for a student that is distributed over processes, the copy of it whose
    decoder the generator has. Then all ranks call `generate` with the same requests, and `update_weights` with the
    same version. Each rank writes some of the batches, and every rank gets all completions. They are those of one
    process, but for rounding where other requests share a batch.
    """

    def __init__(self, generator: Generator, version: int = 0, *, copy: StudentCopy | None = None):
        assert copy is None or copy.decoder is generator.decoder, "the generator needs the copy's decoder"
        self._generator, self._version, self._copy = generator, version, copy

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """The completions. Raises ValueError as `Generator.generate` does; if one rank does, on all ranks."""
        if self._copy is None:
            return [_done(each) for each in self._generator.generate(requests, self._version)]
        return [_done(each) for each in self._shared(requests, self._copy)]

    def generate_on_this_rank(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The completions, all of which this process writes. No collective: a single rank may call it."""
        return self._generator.generate(requests, self._version)

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on. folder: has no effect."""
        if self._copy is not None:
            self._copy.refresh()
        self._version = version

    def close(self) -> None:
        """Nothing is under way between two calls."""

    def _shared(self, requests: Sequence[GenerationRequest], copy: StudentCopy) -> list[Completion]:
        self._generator.check(requests)
        ranks = copy.mesh.ranks
        batches = self._generator.batches(requests, least=ranks.size)
        own: dict[str, Any] = {"error": None, "completions": []}
        try:
            for batch in ranks.share(batches):
                completions = self._generator.batch([requests[at] for at in batch], self._version)
                own["completions"] += [[at, *_as_json(each)] for at, each in zip(batch, completions, strict=True)]
        except ValueError as error:  # the other ranks wait for this one: all of them raise it
            own["error"] = str(error)
        found: dict[int, Completion] = {}
        for each in ranks.gather(own):
            if each["error"] is not None:
                raise ValueError(each["error"])
            found |= {at: _from_json(values, self._version) for at, *values in each["completions"]}
        return [found[at] for at in range(len(requests))]


def _as_json(completion: Completion) -> list[Any]:
    # a float32 is exact as a float64, and so is its decimal representation
    return [completion.ids_N.tolist(), completion.log_probs_N.tolist(), completion.finish]


def _from_json(values: list[Any], version: int) -> Completion:
    ids, log_probs, finish = values
    versions_N = np.full(len(ids), version, dtype=np.int32)
    return Completion(np.array(ids, dtype=np.int32), np.array(log_probs, dtype=np.float32), versions_N, finish)


def _done(completion: Completion) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_result(completion)
    return future
