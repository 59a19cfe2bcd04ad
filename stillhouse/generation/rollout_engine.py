"""The interface of an engine that writes completions: the same calls in this process and over HTTP."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from stillhouse.generation.sample import Completion, GenerationRequest


class RolloutEngine(Protocol):
    """Writes completions with the student's weights, and takes new weights."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Ask for completions; returns at once, one future for each request.

        An engine in this process computes them before it returns. A future raises ServerError if no server answers
        in time, ValueError if an answer cannot be right.
        """
        ...

    def update_weights(self, version: int, folder: Path | None) -> None:
        """Use the student's present weights from now on, as this version.

        folder: where they have been published; None if the engine has the student itself. No token is written by a
        mixture of two versions. Requests that are under way go on with the new weights; each token has its version.
        """
        ...

    def close(self) -> None:
        """Give up requests that are under way."""
        ...
