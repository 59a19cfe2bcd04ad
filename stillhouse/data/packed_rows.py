"""Packs documents into the rows of a micro-batch.

Labels are shifted only here: row t of the flattened micro-batch predicts the token at t+1 of the same document. So a
document's last row predicts nothing, and the row of a prompt's last token predicts the first token of the completion.

A teacher with substitutions reads another number of tokens than the student: more tokens with a prefix, more or fewer
with other tokens of media. So a document has one version for the student and one for each such teacher. The document
gets as many columns as the longest version needs, and all versions end in the last of these columns. A gap of padding
fills the columns before a shorter version, and has the positions of a separate document. So after a document's last
substitution, a token has the same row number for student and teacher: layouts with stages or context ranks need it.
Before that, `MicroBatch.teacher_shift_T` is the teacher's row number minus the student's. For a teacher that does not
read the document, all of these columns are padding.

B rows, S columns per row (the longest row of the micro-batch), T = B·S; M documents with N tokens, of which P are
predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents
from stillhouse.data.media import MediaInputs
from stillhouse.data.micro_batch import NO_LABEL, MicroBatch
from stillhouse.data.offsets import chosen_tokens, offsets_of


def make_micro_batch(
    documents: Documents,
    rows: Sequence[Sequence[int] | np.ndarray],
    gaps: Sequence[str] = (),
    teacher: str | None = None,
    media_inputs: MediaInputs | None = None,
) -> MicroBatch:
    """Pack documents into a micro-batch.

    rows: for each row, the numbers of its documents, in order.
    gaps: names of teachers. The columns of a document also have room for the tokens that these teachers read.
    teacher: the teacher of the `teacher_inputs`, one of `gaps`.
    media_inputs: makes the inputs from media. Without it, only documents without media can be packed.

    Raises ValueError if there is no row, if a row has no document, and if a file of media has changed.
    """
    if documents.media is not None and media_inputs is None:
        raise ValueError(f"{documents.report.source} has images, which need media_inputs: expected texts only")
    if not rows or not all(len(row) for row in rows):
        raise ValueError("a micro-batch needs at least one row, and each row at least one document")
    places = _Places.of(documents, rows, gaps)
    offsets, index_N = chosen_tokens(documents.offsets, places.document_M)
    lengths_M, ids_N = np.diff(offsets), documents.tokens_N[index_N]
    row_N, is_predicted_N = places.rows(lengths_M), np.ones(len(ids_N), dtype=bool)
    is_predicted_N[offsets[:-1]] = False  # no row predicts a document's first token
    index_P, row_P = index_N[is_predicted_N], row_N[is_predicted_N] - 1  # the predicted tokens and their rows
    is_target_P = documents.targets_N[index_P]
    labels_T = places.filled(NO_LABEL, np.int64, row_P, np.where(is_target_P, ids_N[is_predicted_N], NO_LABEL))
    weights_P = 1.0 if documents.weights_N is None else documents.weights_N[index_P]
    document_N = np.repeat(places.document_M, lengths_M)
    per_token = {
        name: places.filled(0, np.float32, row_P, values_N[index_P]) for name, values_N in documents.per_token.items()
    }
    inputs, media_M = _packed_inputs(places, ids_N, lengths_M, ids_N[0]), list[dict[str, Tensor]]()
    if media_inputs is not None:
        members = places.document_M.tolist()
        ids_M = [documents.tokens(member) for member in members]
        media_M = media_inputs.tensors(documents, members, ids_M)
        inputs |= _media_inputs(places, inputs, ids_M, media_M, media_inputs)
    return MicroBatch(
        inputs=inputs,
        labels_T=torch.from_numpy(labels_T),
        weights_T=torch.from_numpy(places.filled(0, np.float32, row_P, np.where(is_target_P, weights_P, 0.0))),
        document_T=torch.from_numpy(places.filled(-1, np.int64, row_N, document_N)),
        valid_index=torch.from_numpy(np.flatnonzero(labels_T >= 0)),
        per_token={name: torch.from_numpy(values_T) for name, values_T in per_token.items()},
        media={} if media_inputs is None else media_inputs.processor.join(media_M),
        **({} if teacher is None else _teacher_tensors(documents, places, teacher, media_inputs, media_M)),
    )


def _teacher_tensors(
    documents: Documents,
    places: "_Places",
    teacher: str,
    media_inputs: MediaInputs | None,
    media_M: Sequence[dict[str, Tensor]],
) -> dict[str, Any]:
    """The fields of a micro-batch for a teacher with substitutions. media_M: the tensors of the student's media."""
    substitutions, members = documents.substitutions_of(teacher), places.document_M.tolist()
    ids_M = [substitutions.tokens(member, documents.tokens(member)) for member in members]
    lengths_M, ids_N = np.asarray([len(ids) for ids in ids_M]), np.concatenate(ids_M)
    inputs = _packed_inputs(places, ids_N, lengths_M, [*ids_N[:1], documents.tokens(members[0])[0]][0])
    media: dict[str, Tensor] = {}
    if media_inputs is not None and (teacher_media := media_inputs.teachers.get(teacher, media_inputs)) is not None:
        if teacher_media is not media_inputs:
            media_M = teacher_media.tensors(documents, members, ids_M, may_skip=True)
        media = teacher_media.processor.join(media_M)
        inputs |= _media_inputs(places, inputs, ids_M, media_M, teacher_media)
    student_M = np.asarray([len(documents.tokens(member)) for member in members])
    shifts_M = []
    for member, length, student_length in zip(members, lengths_M, student_M, strict=True):
        row_S = substitutions.rows(member, student_length)
        shifts_M.append(np.where(row_S < 0, 0, row_S - length - np.arange(-student_length, 0)))
    shift_N = np.concatenate(shifts_M)
    shift_T = torch.from_numpy(places.filled(0, np.int64, places.rows(student_M), shift_N))
    document_T = places.filled(-1, np.int64, places.rows(lengths_M), np.repeat(places.document_M, lengths_M))
    return {
        "teacher_inputs": inputs,
        "teacher_media": media,
        "teacher_document_T": torch.from_numpy(document_T),
        "teacher_shift_T": shift_T if shift_N.any() else None,
    }


@dataclass(frozen=True)
class _Places:
    """The places of M documents in a micro-batch, row by row and from left to right. stop_M: for each document, the
    index after its last token in the flattened micro-batch (0 … T).
    """

    shape_BS: tuple[int, int]
    document_M: np.ndarray
    stop_M: np.ndarray

    @classmethod
    def of(cls, documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str]) -> "_Places":
        document_M = np.concatenate([np.asarray(members, dtype=np.int64) for members in rows])
        counts_B, offsets = [len(members) for members in rows], offsets_of(documents.widths(gaps, document_M))
        columns_M = offsets[1:] - np.repeat(offsets[offsets_of(counts_B)[:-1]], counts_B)
        shape_BS = len(rows), int(columns_M.max())
        return cls(shape_BS, document_M, columns_M + np.repeat(np.arange(len(rows)) * shape_BS[1], counts_B))

    def rows(self, lengths_M: np.ndarray) -> np.ndarray:
        """The index of each token in the flattened micro-batch, [N], if the M documents have these lengths."""
        offsets = offsets_of(lengths_M)
        return np.arange(offsets[-1]) + np.repeat(self.stop_M - offsets[1:], lengths_M)

    def filled(self, value: float, dtype: type, rows_P: np.ndarray, values_P: np.ndarray) -> np.ndarray:
        """An array [T] with `values_P` at the indices `rows_P`, and `value` everywhere else."""
        filled_T: np.ndarray = np.full(self.shape_BS[0] * self.shape_BS[1], value, dtype=dtype)
        filled_T[rows_P] = values_P
        return filled_T


def _packed_inputs(places: _Places, ids_N: np.ndarray, lengths_M: np.ndarray, padding: int) -> dict[str, Tensor]:
    """Token ids and positions. ids_N: the ids of all documents. Each document ends before its `stop_M`. All other
    columns are padding, and in each run of padding the positions begin at 0. padding: the id of padding, which is a
    token of the data. It is not id 0, because Gemma 3n's embedding of id 0 is zero and has no finite gradient.
    """
    input_ids_T = places.filled(padding, np.int64, places.rows(lengths_M), ids_N)
    row_T = np.arange(len(input_ids_T))
    is_start_T = row_T % places.shape_BS[1] == 0
    starts_and_stops = np.concatenate([places.stop_M - lengths_M, places.stop_M])
    is_start_T[starts_and_stops[starts_and_stops < len(row_T)]] = True
    position_T = row_T - np.maximum.accumulate(np.where(is_start_T, row_T, 0))
    return {
        name: torch.from_numpy(values_T.reshape(places.shape_BS))
        for name, values_T in (("input_ids", input_ids_T), ("position_ids", position_T))
    }


def _media_inputs(
    places: _Places,
    inputs: Mapping[str, Tensor],
    ids_M: Sequence[np.ndarray],
    media_M: Sequence[Mapping[str, Tensor]],
    media_inputs: MediaInputs,
) -> dict[str, Tensor]:
    """The additional inputs per token of models that read media. ids_M, media_M: each document's ids and media."""
    made: dict[str, Tensor] = {}
    for ids, media, stop in zip(ids_M, media_M, places.stop_M.tolist(), strict=True):
        for name, values in media_inputs.per_token(ids, media).items():
            if name not in made:
                zeros = torch.zeros(*inputs["input_ids"].shape, *values.shape[1:], dtype=torch.int64)
                made[name] = zeros if values.ndim == 1 else zeros + inputs["position_ids"][..., None]
            made[name].flatten(0, 1)[stop - len(ids) : stop] = torch.from_numpy(values)
    return made
