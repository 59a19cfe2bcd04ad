"""The micro-batches of a step, before they are sharded and padded for a layout."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from stillhouse.data.micro_batch import MicroBatch
from stillhouse.data.render.media_inputs import DocumentMedia


class StepMicroBatches(Sequence[MicroBatch]):
    """All micro-batches of a step, or of a part of an evaluation. Every process of a run has all of them.

    A subclass may build a micro-batch when it is accessed (`_build`).
    """

    def __init__(self, micro_batches: Sequence[MicroBatch]):
        self._micro_batches = micro_batches

    def __len__(self) -> int:
        return len(self._micro_batches)

    @overload
    def __getitem__(self, number: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, number: slice) -> list[MicroBatch]: ...
    def __getitem__(self, number: int | slice) -> MicroBatch | list[MicroBatch]:
        chosen = range(len(self))[number]
        return self._build(chosen) if isinstance(chosen, int) else [self._build(at) for at in chosen]

    def _build(self, number: int) -> MicroBatch:
        return self._micro_batches[number]

    @property
    def shapes_BS(self) -> list[tuple[int, int]]:
        """Rows and columns of each micro-batch."""
        return [micro_batch.shape_BS for micro_batch in self._micro_batches]

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents, without padding and gaps."""
        return sum(int((micro_batch.document_T >= 0).sum()) for micro_batch in self._micro_batches)

    @property
    def targets(self) -> int:
        """The number of target tokens of the step."""
        return sum(micro_batch.valid_tokens for micro_batch in self._micro_batches)

    @property
    def normalizer(self) -> int:
        """The divisor of the step's losses: the number of its target tokens, at least 1."""
        return max(1, self.targets)

    def document_tokens(self, document: int) -> np.ndarray:
        """The token ids of a document, by its number in `MicroBatch.document_T`."""
        for micro_batch in self._micro_batches:
            if bool((is_of_T := micro_batch.document_T == document).any()):
                return micro_batch.input_ids_BS.flatten()[is_of_T].cpu().numpy()
        raise ValueError(f"no micro-batch of this step has document {document}")

    def document_media(self, document: int) -> DocumentMedia | None:
        """The media of a document, by its number in `MicroBatch.document_T`; None without media."""
        if any(micro_batch.media for micro_batch in self._micro_batches):
            raise ValueError(f"the images of document {document} are not known: these are only tensors")
        return None

    def documents_of(self, number: int) -> list[int]:
        """The documents of micro-batch `number`."""
        document_T = self[number].document_T
        return document_T[document_T >= 0].unique().tolist()

    def value(self, document: int, column: str) -> Any:
        """A document's value in a column of the data. Raises ValueError if the column was not kept."""
        raise ValueError(f"column '{column}' of document {document} is not known: these are only tokens")

    def for_teacher(self, name: str) -> "StepMicroBatches":
        """The same micro-batches. If this teacher has substitutions that fit into them, they have its
        `teacher_inputs`.
        """
        return self

    def teacher_tokens(self, document: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """All ids that this teacher reads of a document, and, for each of the student's rows of it, the teacher's row
        that predicts the same token (see `Substitutions.rows`), which does not depend on gaps.
        """
        ids = self.document_tokens(document)
        return ids, np.arange(len(ids))
