"""Limits on the size of requests. A request that exceeds a limit is refused before it reaches the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stillhouse.serving.server.bodies import refused
from stillhouse.serving.wire import JSON, SAFETENSORS
from stillhouse.signals.scorer import ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: signals that one process can compute, and those under tensor parallelism ("sampled" needs the full vocabulary)
SIGNALS = ("hidden", "top_k", "chosen", "sampled")
SIGNALS_OF_SHARDS = ("hidden", "top_k", "chosen")
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """The largest values of a client's request.

    vocabulary: rows of the model's head. max_tokens: tokens per sequence.
    max_request_tokens, max_sequences: tokens and sequences per request. max_top_k: ids per token.
    json_bytes, binary_bytes: bytes of one body; image_bytes: more of a binary one, for images.
    bodies_bytes: bytes of all bodies that are in memory at a time, beside those of images.
    """

    vocabulary: int
    max_tokens: int
    max_request_tokens: int
    max_top_k: int
    signals: Sequence[str] = SIGNALS
    max_sequences: int = 4096
    image_bytes: int = 0
    json_bytes: int = 8 * MIB
    binary_bytes: int = 64 * MIB
    bodies_bytes: int = 512 * MIB

    @property
    def body_bytes(self) -> dict[str, int]:
        """The most bytes of a body, by content type."""
        return {JSON: self.json_bytes, SAFETENSORS: self.binary_bytes + self.image_bytes}

    @property
    def all_bodies_bytes(self) -> int:
        """The most bytes of all bodies that are in memory at a time. A body with images stays until its answer."""
        return self.bodies_bytes + 2 * self.image_bytes

    @property
    def most_ids(self) -> int:
        """The most ids per token of a signal: `max_top_k`, or the vocabulary if that is smaller."""
        return min(self.max_top_k, self.vocabulary)

    def parts(self, signal: SignalSpec, documents: Sequence[DocumentRows]) -> list[ScoreRequest]:
        """Split a score request into one part per document. Raises RequestError if it exceeds a limit."""
        if signal.kind not in self.signals:
            raise refused(f"signal '{signal.kind}': this server has {', '.join(self.signals)}", "signal")
        if signal.top_k is not None and signal.top_k > self.most_ids:
            raise refused(f"top_k={signal.top_k}: expected at most {self.most_ids}", "top_k")
        self.check_documents([document.tokens for document in documents], "token_ids")
        for document in documents:
            if document.ids_NK is not None and document.ids_NK.numel():
                wrong = self._beyond(document.ids_NK.numpy(), -1)
                if wrong is not None:
                    raise refused(f"ids: got {wrong}, expected −1 for none, or 0 to {self.vocabulary - 1}", "ids")
        return [ScoreRequest(document, signal) for document in documents]

    def check_count(self, documents: int, param: str) -> None:
        if documents > self.max_sequences:
            raise refused(f"{documents} sequences: expected at most {self.max_sequences} per request", param)

    def check_documents(self, documents: Sequence[Sequence[int] | np.ndarray], param: str) -> None:
        """Raise RequestError for too many documents or tokens, an empty document, or an id outside the vocabulary."""
        self.check_count(len(documents), param)
        total = sum(map(len, documents))
        if total > self.max_request_tokens:
            raise refused(f"{total} tokens: expected at most {self.max_request_tokens} per request", param)
        for number, tokens in enumerate(documents):
            if not 1 <= len(tokens) <= self.max_tokens:
                raise refused(
                    f"sequence {number} has {len(tokens)} tokens: expected 1 to {self.max_tokens} (the model's "
                    "positions, and the server's --batch-tokens)",
                    param,
                )
            wrong = self._beyond(np.asarray(tokens), 0)
            if wrong is not None:
                raise refused(
                    f"sequence {number} has the token id {wrong}: expected 0 to {self.vocabulary - 1}, the rows of "
                    "the teacher's head",
                    param,
                )

    def _beyond(self, ids: np.ndarray, least: int) -> int | None:
        """An id below `least` or beyond the vocabulary; None if there is none."""
        smallest, largest = int(ids.min()), int(ids.max())
        return smallest if smallest < least else largest if largest >= self.vocabulary else None
