"""The engine that writes completions in this process (see `RolloutEngine`)."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from stillhouse.generation.generate import Generator
from stillhouse.generation.sample import Completion, GenerationRequest


class InProcessEngine:
    """Writes completions with a generator; its futures are done when `generate` returns.

    version: of the present weights.
    """

    def __init__(self, generator: Generator, version: int = 0):
        self.generator, self.version = generator, version

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """The completions. Raises ValueError as `Generator.generate` does."""
        return [done(completion) for completion in self.generate_on_this_rank(requests)]

    def generate_on_this_rank(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The completions, all of which this process writes. No collective: a single rank may call it."""
        return self.generator.generate(requests, self.version)

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on. folder: has no effect."""
        self.version = version

    def close(self) -> None:
        """Nothing is under way between two calls."""


def done(completion: Completion) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_result(completion)
    return future
