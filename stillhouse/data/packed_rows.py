"""Packs documents into the rows of a micro-batch.

Labels are shifted only here: row t of the flattened micro-batch predicts the token at t+1 of the same document. So a
document's last row predicts nothing, and the row of a prompt's last token predicts the first token of the completion.

A teacher with a prefix reads more tokens than the student, but under every layout a token must have the same row
number for student and teacher. So the student's micro-batch has a gap before each document. The gap is as long as the
document's longest prefix among the named teachers. The student reads padding in the gap, as a separate document. A
teacher reads its prefix directly before the document, and padding in the part of the gap before the prefix.

B rows, S columns per row (the longest of the micro-batch), T = B·S.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents
from stillhouse.data.micro_batch import NO_LABEL, MicroBatch


def make_micro_batch(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str] = ()
) -> MicroBatch:
    """Pack documents into a micro-batch.

    rows: for each row, the numbers of its documents, in order.
    gaps: names of teachers. The gap before a document has the length of its longest prefix for these teachers.

    Raises ValueError if there is no row, or a row without a document.
    """
    if not rows or not all(len(row) for row in rows):
        raise ValueError("a micro-batch needs at least one row, and each row at least one document")
    placed = _placed(documents, rows, gaps)
    inputs = _packed_inputs(placed, [documents.tokens(document) for _, document, _ in placed])
    shape_BS = inputs["input_ids"].shape
    labels_BS = np.full(shape_BS, NO_LABEL, dtype=np.int64)
    weights_BS = np.zeros(shape_BS, dtype=np.float32)
    document_BS = np.full(shape_BS, -1, dtype=np.int64)
    per_token_BS = {name: np.zeros(shape_BS, dtype=np.float32) for name in documents.per_token}
    for row, document, stop in placed:
        ids, targets = documents.tokens(document), documents.targets(document)
        start = stop - len(ids)
        labels_BS[row, start : stop - 1] = np.where(targets[1:], ids[1:], NO_LABEL)
        weights = 1.0 if documents.weights_N is None else documents.part(documents.weights_N, document)[1:]
        weights_BS[row, start : stop - 1] = np.where(targets[1:], weights, 0.0)
        document_BS[row, start:stop] = document
        for name, values_N in documents.per_token.items():
            per_token_BS[name][row, start : stop - 1] = documents.part(values_N, document)[1:]
    labels_T = torch.from_numpy(labels_BS.reshape(-1))
    return MicroBatch(
        inputs=inputs,
        labels_T=labels_T,
        weights_T=torch.from_numpy(weights_BS.reshape(-1)),
        document_T=torch.from_numpy(document_BS.reshape(-1)),
        valid_index=torch.from_numpy(np.flatnonzero(labels_BS >= 0)),
        per_token={name: torch.from_numpy(values_BS.reshape(-1)) for name, values_BS in per_token_BS.items()},
    )


def teacher_inputs(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str], teacher: str
) -> dict[str, Tensor]:
    """The inputs of a teacher with prefixes. Its rows are those of `make_micro_batch(documents, rows, gaps)`."""
    placed, prefixes = _placed(documents, rows, gaps), documents.prefixes[teacher]
    return _packed_inputs(placed, [prefixes.before(at, documents.tokens(at)) for _, at, _ in placed])


def _placed(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str]
) -> list[tuple[int, int, int]]:
    """For each document, row by row and from left to right: (row, document, the document's exclusive end column)."""
    widths_D = documents.lengths_D + documents.gaps_D(gaps)
    return [
        (row, int(document), int(stop))
        for row, members in enumerate(rows)
        for document, stop in zip(members, np.cumsum(widths_D[np.asarray(members)]), strict=True)
    ]


def _packed_inputs(placed: Sequence[tuple[int, int, int]], ids: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Token ids and positions. The `ids` of a document end where the document ends; other columns are padding."""
    shape_BS = placed[-1][0] + 1, max(stop for _, _, stop in placed)
    # padding is a token of the data: id 0 has a zero embedding in Gemma 3n, so that its gradient would not be finite
    input_ids_BS = np.full(shape_BS, ids[0][0], dtype=np.int64)
    position_ids_BS = np.zeros(shape_BS, dtype=np.int64)
    ends_B = [0] * shape_BS[0]
    for (row, _, stop), document_ids in zip(placed, ids, strict=True):
        start = stop - len(document_ids)
        input_ids_BS[row, start:stop] = document_ids
        position_ids_BS[row, ends_B[row] : start] = np.arange(start - ends_B[row])
        position_ids_BS[row, start:stop] = np.arange(stop - start)
        ends_B[row] = stop
    for row, end in enumerate(ends_B):
        position_ids_BS[row, end:] = np.arange(shape_BS[1] - end)
    return {"input_ids": torch.from_numpy(input_ids_BS), "position_ids": torch.from_numpy(position_ids_BS)}
