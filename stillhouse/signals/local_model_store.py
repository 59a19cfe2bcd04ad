"""A signal store that runs a teacher in this process on the documents of each read.

It is used to write a cache, and for a teacher with another tokenizer. Such a teacher has other rows than the student,
so it cannot run in the student's stages.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock

import torch
from torch import Tensor

from stillhouse.data import Documents
from stillhouse.data.media import MediaInputs, MediaProcessor
from stillhouse.models import Decoder, check_document_length
from stillhouse.parallel import single_process_runner
from stillhouse.signals.scorer import Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec, problem_in
from stillhouse.signals.signal_store import SignalStore


class LocalModelStore(SignalStore):
    """A full copy of a teacher in this process.

    name: the teacher's name
    identity: a hash of the teacher's files
    load: loads the model onto a device
    tokens: the maximum number of tokens in a forward pass; a longer document gets its own forward pass
    processor: the teacher's processor of media; None: the documents are texts
    packs_all: whether all documents of a read are packed before they are divided into batches, for less padding
    """

    def __init__(
        self,
        name: str,
        identity: str,
        signal: SignalSpec,
        load: Callable[[torch.device], Decoder],
        tokens: int,
        *,
        processor: MediaProcessor | None = None,
        packs_all: bool = False,
    ):
        self.name, self.identity, self.signal, self._load, self._tokens = name, identity, signal, load, tokens
        self._packs_all, self._processor = packs_all, processor
        self._media_inputs: MediaInputs | None = None
        self._decoder: Decoder | None = None
        self._longest = self._largest_id = 0
        self._running = Lock()

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Store the length of the longest document and the largest id; `start` checks them against the model."""
        self._longest = max(self._longest, int(documents.lengths_D.max(initial=0)))
        self._largest_id = max(self._largest_id, int(documents.tokens_N.max(initial=0)))

    def start(self, device: torch.device) -> None:
        """Load the model, and prove it on media if it reads some.

        Raises ValueError if the model cannot read the documents that `require` got.
        """
        if self._decoder is None:
            decoder = self._load(device).requires_grad_(False)
            check_document_length(decoder.pretrained, self._longest, "teacher")
            if self._largest_id >= decoder.vocabulary_rows:
                raise ValueError(
                    f"a text has the teacher's token id {self._largest_id}, but the teacher's head has "
                    f"{decoder.vocabulary_rows} rows: model and tokenizer do not belong together"
                )
            if self._processor is not None:
                self._media_inputs = proven_media_inputs(decoder, self._processor)
            self._decoder = decoder

    def read(self, wanted: Sequence[DocumentRows]) -> list[dict[str, Tensor]]:
        assert self._decoder is not None
        device = next(self._decoder.parameters()).device
        scorer = Scorer(single_process_runner(self._decoder, None), device, self._media_inputs)
        requests = [ScoreRequest(document, self.signal) for document in wanted]
        with self._running, torch.no_grad():
            if self._packs_all:
                signals = scorer.tensors(requests, self._tokens)
            else:
                signals = [tensors for batch in self._batches(requests) for tensors in scorer.tensors(batch)]
        for document, tensors in zip(wanted, signals, strict=True):
            if problem := problem_in(self.signal, self._decoder.vocabulary_rows, tensors):
                where = f" on {document.source}" if document.source else ""
                raise ValueError(f"the teacher's {problem}{where}: expected a teacher that can run in this dtype")
        return signals

    def _batches(self, requests: Sequence[ScoreRequest]) -> Iterator[list[ScoreRequest]]:
        batch: list[ScoreRequest] = []
        for request in requests:
            if batch and sum(other.tokens for other in batch) + request.tokens > self._tokens:
                yield batch
                batch = []
            batch.append(request)
        if batch:
            yield batch
