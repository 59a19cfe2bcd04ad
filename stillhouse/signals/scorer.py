"""Runs a teacher in this process on batches of documents, and computes the signal requested for each document.

The layers run once for all documents, packed into rows as in training. Each requested signal is then computed from
the hidden states of its rows.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.data import DataReport, Documents, MicroBatch, PackedSequences
from stillhouse.data.media import MEDIA, MediaInputs, MediaProcessor, media_kind
from stillhouse.data.offsets import offsets_of
from stillhouse.models import Decoder, NotFiniteError, check_document_length
from stillhouse.models.document_packing import ROWS
from stillhouse.objective import OutputHead
from stillhouse.parallel import Runner, StageInputs, single_process_runner
from stillhouse.signals.extract import SignalRows, Wanted, extract
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec, problem_in
from stillhouse.signals.signal_store import SignalStore


class ScoreRequest(NamedTuple):
    """Rows of a document, and the signal that is requested for them."""

    document: DocumentRows
    wanted: Wanted

    @property
    def tokens(self) -> int:
        return len(self.document.tokens)

    @property
    def has_media(self) -> bool:
        return self.document.media is not None


#: the result of a request: the tensors, or an error if they are not finite
Outcome: TypeAlias = dict[str, Tensor] | NotFiniteError


class Scorer:
    """Scores documents with a teacher. Under tensor parallelism, all ranks must score the same batches.

    media_inputs: the result of `proven_media_inputs`. If it is None, documents with media are refused.
    """

    def __init__(self, runner: Runner, device: torch.device, media_inputs: MediaInputs | None = None):
        self._runner, self._device, self._media_inputs = runner, device, media_inputs
        self._decoder = runner.decoders[0].eval()

    def score(self, requests: Sequence[ScoreRequest]) -> list[Outcome]:
        """For each request, return its tensors on the CPU, or a `NotFiniteError` if the tensors are not finite.

        Raises RuntimeError if the forward pass fails, and ValueError for media that do not fit their documents.
        """
        outcomes: list[Outcome] = []
        for tensors in self.tensors(requests):
            problems = [
                f"the teacher's {name} are not finite"
                for name, tensor in tensors.items()
                if tensor.isnan().any() or (name == "hidden" and tensor.isinf().any())
            ]
            if "counts" in tensors and not (tensors["ids"][:, :1] >= 0).all():
                problems.append("the teacher's logits are not finite, so that no id can be sampled")
            outcomes.append(NotFiniteError(problems[0]) if problems else tensors)
        return outcomes

    def tensors(self, requests: Sequence[ScoreRequest], batch_tokens: int | None = None) -> list[dict[str, Tensor]]:
        """Return the tensors of each request on the CPU. The tensors can contain NaN or infinity.

        batch_tokens: the maximum number of tokens in a forward pass of several documents; None: no maximum
        """
        media_inputs: MediaInputs | None = None
        if any(request.has_media for request in requests):
            if self._media_inputs is None:
                raise ValueError(
                    f"a document has {MEDIA}, and the teacher was not loaded with a processor of {MEDIA}"
                )
            media_inputs = _RequestMedia(self._media_inputs, [request.document for request in requests])
        tokens_N = np.concatenate([request.document.tokens for request in requests]).astype(np.int32)
        documents = Documents(
            tokens_N,
            np.zeros(len(tokens_N), dtype=bool),
            offsets_of([request.tokens for request in requests]),
            np.zeros(len(requests), dtype=np.uint64),
            [""] * len(requests),
            DataReport("requests"),
        )
        row_tokens = longest = int(documents.lengths_D.max())
        if by_length := self._decoder.packing.name == ROWS:
            row_tokens = max(longest, batch_tokens or len(tokens_N))
        sequences = PackedSequences(
            documents, max_tokens=row_tokens, seed=0, shuffle=False, by_length=by_length, media_inputs=media_inputs
        )
        at_a_time = len(sequences) if batch_tokens is None else max(1, batch_tokens // longest)
        at_a_time = 1 if by_length else at_a_time
        signals: dict[int, dict[str, Tensor]] = {}
        for start in range(0, len(sequences), at_a_time):
            micro_batch = sequences.micro_batch(range(start, min(start + at_a_time, len(sequences))))
            signals |= self._batch(micro_batch, requests)
        return [signals[number] for number in range(len(requests))]

    def _batch(self, micro_batch: MicroBatch, requests: Sequence[ScoreRequest]) -> dict[int, dict[str, Tensor]]:
        is_first_T = (micro_batch.position_ids_BS.flatten() == 0) & (micro_batch.document_T >= 0)
        firsts = micro_batch.document_T[is_first_T].tolist()
        starts = dict(zip(firsts, is_first_T.nonzero()[:, 0].tolist(), strict=True))
        numbers_by_wanted: dict[Wanted, list[int]] = {}
        for number in sorted(firsts):
            numbers_by_wanted.setdefault(requests[number].wanted, []).append(number)
        rows = {
            wanted: SignalRows.of(wanted, [requests[at].document for at in numbers], [starts[at] for at in numbers])
            for wanted, numbers in numbers_by_wanted.items()
        }
        inputs = StageInputs(micro_batch.to(self._device), {}, partial(_extract_all, rows))
        (signals,) = self._runner.forward([inputs])
        by_document: dict[int, dict[str, Tensor]] = {number: {} for number in firsts}
        for wanted, numbers in numbers_by_wanted.items():
            lengths = [len(requests[number].document.rows) for number in numbers]
            for name, tensor in signals[wanted].items():
                for number, rows_of_document in zip(numbers, tensor.split(lengths), strict=True):
                    by_document[number][name] = rows_of_document
        return by_document


class _RequestMedia(MediaInputs):
    def __init__(self, inputs: MediaInputs, documents: Sequence[DocumentRows]):
        super().__init__(inputs.processor, inputs.axis_positions)
        self._documents = documents

    def tensors(
        self, documents: Documents, members: Sequence[int], ids_M: Sequence[np.ndarray], *, may_skip: bool = False
    ) -> list[dict[str, Tensor]]:
        media = (self._documents[member].media for member in members)
        return [{} if document_media is None else dict(document_media.read().tensors) for document_media in media]


def proven_media_inputs(
    decoder: Decoder, processor: MediaProcessor, agreed: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> MediaInputs:
    """Prove a teacher on documents with media, and return its `MediaInputs`. agreed: see `prove_images`"""
    media_kind(processor).prove(decoder, processor, agreed)
    return MediaInputs(processor, decoder.axis_positions)


def _extract_all(
    rows: Mapping[Wanted, SignalRows], *, hidden_states: Tensor, head: OutputHead, context: Any, depth: int = 0
) -> dict[Wanted, dict[str, Tensor]]:
    return {wanted: extract(wanted, hidden_states, head, some) for wanted, some in rows.items()}


class LocalModelStore(SignalStore):
    """A signal store with a full copy of a teacher in this process, which runs on the documents of each read.

    It is used to write a cache, and for a teacher with another tokenizer. Such a teacher reads other tokens than the
    student, and so cannot run in the student's stages.

    tokens: the maximum number of tokens in a forward pass; a longer document gets its own forward pass
    processor: the teacher's processor of media; None if the documents are texts
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
        """Load the model, and prove it on media. Raises ValueError if it cannot read the documents of `require`."""
        if self._decoder is not None:
            return
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
        batches: list[list[ScoreRequest]] = []
        for request in requests:
            if not batches or sum(other.tokens for other in batches[-1]) + request.tokens > self._tokens:
                batches.append([])
            batches[-1].append(request)
        with self._running, torch.no_grad():
            if self._packs_all:
                signals = scorer.tensors(requests, self._tokens)
            else:
                signals = [tensors for batch in batches for tensors in scorer.tensors(batch)]
        for document, tensors in zip(wanted, signals, strict=True):
            if problem := problem_in(self.signal, self._decoder.vocabulary_rows, tensors):
                where = f" on {document.source}" if document.source else ""
                raise ValueError(f"the teacher's {problem}{where}: expected a teacher that can run in this dtype")
        return signals
