"""What a request may ask for. Everything beyond is refused before the model sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stillhouse.serving.server.bodies import refused
from stillhouse.signals.scorer import ScoreRequest
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: the signals that a server computes; draws need the whole vocabulary in one process
SIGNALS = ("hidden", "top_k", "chosen", "sampled")
SIGNALS_OF_SHARDS = ("hidden", "top_k", "chosen")
MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """What clients may send.

    vocabulary: rows of the teacher's head. max_tokens: of a sequence. max_request_tokens, max_sequences: of a
    request. max_top_k: ids per token. json_bytes, binary_bytes: of a body. bodies_bytes: of all bodies that are being
    read.
    """

    vocabulary: int
    max_tokens: int
    max_request_tokens: int
    max_top_k: int
    signals: Sequence[str] = SIGNALS
    max_sequences: int = 4096
    json_bytes: int = 8 * MIB
    binary_bytes: int = 64 * MIB
    bodies_bytes: int = 512 * MIB

    @property
    def most_ids(self) -> int:
        """The most ids per token of a signal."""
        return min(self.max_top_k, self.vocabulary)

    def parts(self, signal: SignalSpec, documents: Sequence[DocumentRows]) -> list[ScoreRequest]:
        """The parts of a request for a signal. Raises RequestError for one beyond the limits."""
        if signal.kind not in self.signals:
            raise refused(f"signal '{signal.kind}': this server has {', '.join(self.signals)}", "signal")
        if signal.top_k is not None and signal.top_k > self.most_ids:
            raise refused(f"top_k={signal.top_k}: expected at most {self.most_ids}", "top_k")
        self.check_documents([document.tokens for document in documents], "token_ids")
        for document in documents:
            ids_NK = document.ids_NK
            if ids_NK is not None and ids_NK.numel():
                smallest, largest = (int(bound) for bound in ids_NK.aminmax())
                if smallest < -1 or largest >= self.vocabulary:
                    wrong = smallest if smallest < -1 else largest
                    raise refused(f"ids: got {wrong}, expected −1 for none, or 0 to {self.vocabulary - 1}", "ids")
        return [ScoreRequest(document, signal) for document in documents]

    def check_count(self, documents: int, param: str) -> None:
        if documents > self.max_sequences:
            raise refused(f"{documents} sequences: expected at most {self.max_sequences} per request", param)

    def check_documents(self, documents: Sequence[Sequence[int] | np.ndarray], param: str) -> None:
        """Raise RequestError for too many documents, too long ones, and ids beyond the vocabulary."""
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
            ids = np.asarray(tokens)
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest >= self.vocabulary:
                wrong = smallest if smallest < 0 else largest
                raise refused(
                    f"sequence {number} has the token id {wrong}: expected 0 to {self.vocabulary - 1}, the rows of "
                    "the teacher's head",
                    param,
                )
