"""A teacher in this process as a store of signals: it is asked by documents, and runs when it is asked.

In its own tokens a document has other rows than in the student's, so such a teacher cannot run in the student's
stages. Each process that reads signals holds the whole teacher.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from stillhouse.data import Documents
from stillhouse.models import Decoder, check_document_length
from stillhouse.parallel import single_process_runner
from stillhouse.signals.scorer import NotFiniteError, Scorer, ScoreRequest
from stillhouse.signals.signal_checks import problem_in
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec


class TeacherInJob:
    """A `SignalStore` of a model in this job.

    name: of the teacher
    identity: a hash of its files
    load: returns the model on a device
    tokens: how many tokens run through the model at a time, unless a single document has more
    """

    width = 0  # "top_k" does not need it
    teacher_folder: Path | None = None
    may_take_long = False  # the teacher's forward is a part of the step

    def __init__(
        self, name: str, identity: str, signal: SignalSpec, load: Callable[[torch.device], Decoder], tokens: int
    ):
        self.name, self.identity, self.signal, self._load, self._tokens = name, identity, signal, load, tokens
        self._decoder: Decoder | None = None
        self._longest = self._largest_id = 0
        self._running = Lock()

    def require(self, documents: Documents, what: str) -> None:
        """Remember the longest document and the largest id: `start` checks whether the model reads them."""
        self._longest = max(self._longest, int(documents.lengths_D.max(initial=0)))
        self._largest_id = max(self._largest_id, int(documents.tokens_N.max(initial=0)))

    def start(self, device: torch.device) -> None:
        """Load the model, unless it is loaded. Raises ValueError if it does not fit the documents."""
        if self._decoder is None:
            decoder = self._load(device).requires_grad_(False)
            check_document_length(decoder.pretrained, self._longest, "teacher")
            if self._largest_id >= decoder.vocabulary_rows:
                raise ValueError(
                    f"a text has the teacher's token id {self._largest_id}, but the teacher's head has "
                    f"{decoder.vocabulary_rows} rows: model and tokenizer do not belong together"
                )
            self._decoder = decoder

    def read(self, wanted: Sequence[DocumentRows]) -> list[dict[str, Tensor]]:
        assert self._decoder is not None
        decoder, signals = self._decoder, list[dict[str, Tensor]]()
        device = next(decoder.parameters()).device
        with self._running, torch.no_grad():
            scorer = Scorer(single_process_runner(decoder, None), device)
            for batch in self._batches(wanted):
                for outcome in scorer.score(batch):
                    signals.append(self._checked(outcome, decoder.vocabulary_rows))
        return signals

    def close(self) -> None:
        """Nothing is under way between two reads."""

    def _batches(self, wanted: Sequence[DocumentRows]) -> Iterator[list[ScoreRequest]]:
        batch: list[ScoreRequest] = []
        for document in wanted:
            if batch and sum(request.tokens for request in batch) + len(document.tokens) > self._tokens:
                yield batch
                batch = []
            batch.append(ScoreRequest(document, self.signal))
        if batch:
            yield batch

    def _checked(self, outcome: dict[str, Tensor] | NotFiniteError, vocabulary: int) -> dict[str, Tensor]:
        if isinstance(outcome, NotFiniteError):
            raise outcome
        if problem := problem_in(self.signal, vocabulary, outcome):
            raise ValueError(f"the teacher's {problem}: expected a teacher that can run in this dtype")
        return outcome
