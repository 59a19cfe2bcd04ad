"""A micro-batch: all data of some packed sequences, and nothing about losses.

Labels are shifted only here: row t of the flattened micro-batch predicts the token at t+1 of the same document. So a
document's last row predicts nothing, and the row of a prompt's last token predicts the first token of the completion.

A teacher with a prefix reads more tokens than the student. So that the rows of both line up under every layout, the
student's micro-batch has a gap before each document, as long as the longest prefix of this document over the teachers
that are asked for. A gap is padding: the student reads tokens there that do not matter, as a document of their own.
Each teacher has its prefix directly before the document, and padding before a shorter prefix.

B rows, S columns per row (the longest of the micro-batch), T = B·S.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents

NO_LABEL = -1


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B packed sequences; the shorter ones are padded.

    inputs: arguments of a model's forward. It always has `input_ids` and `position_ids`, [B, S] int64. Positions
        restart at every document. They separate the documents only if the model gets no attention mask and
        `use_cache=False`. The padding of a row and each gap are separate documents, without weight. Tensors whose
        first two dims are not [B, S] belong to the micro-batch as a whole.
    labels_T: int64, the token that row t predicts, or -1.
    weights_T: float32, the label's weight, which is 1 unless the documents say otherwise; 0 without a label.
    document_T: int64, the document's number in its `Documents`; -1 for padding.
    valid_index: int64, the rows with a weight, ascending.
    per_token: further tensors [T, …], such as advantages and old log-probabilities.
    teacher_inputs: like `inputs`, if the teacher reads other tokens than the student at the same rows.

    Raises ValueError if the tensors do not have the same rows.
    """

    inputs: Mapping[str, Tensor]
    labels_T: Tensor
    weights_T: Tensor
    document_T: Tensor
    valid_index: Tensor
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    teacher_inputs: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        for inputs in (self.inputs, self.teacher_inputs or self.inputs):
            for name in ("input_ids", "position_ids"):
                found = tuple(inputs[name].shape) if name in inputs else None
                if found != self.shape_BS:
                    raise ValueError(f"{name} of a micro-batch has shape {found}: expected {self.shape_BS}")
        rows, count = self.shape_BS
        own = {name: getattr(self, name) for name in ("labels_T", "weights_T", "document_T")}
        for name, value in (own | dict(self.per_token)).items():
            if len(value) != rows * count:
                raise ValueError(f"{name} of a micro-batch has {len(value)} rows: expected {rows} × {count}")

    @property
    def input_ids_BS(self) -> Tensor:
        return self.inputs["input_ids"]

    @property
    def position_ids_BS(self) -> Tensor:
        return self.inputs["position_ids"]

    @property
    def shape_BS(self) -> tuple[int, int]:
        rows, tokens = self.input_ids_BS.shape
        return rows, tokens

    @property
    def valid_tokens(self) -> int:
        """How many rows have a weight; needs no synchronization with the device."""
        return len(self.valid_index)

    def without_targets(self) -> "MicroBatch":
        """The same tokens without labels, weights and documents, so that none counts."""
        return replace(
            self,
            labels_T=torch.full_like(self.labels_T, NO_LABEL),
            weights_T=torch.zeros_like(self.weights_T),
            document_T=torch.full_like(self.document_T, -1),
            valid_index=self.valid_index[:0],
        )

    def padded(self, rows: int, tokens: int) -> "MicroBatch":
        """The micro-batch, padded to `rows` rows and `tokens` columns. A row's padding is a separate document."""
        if self.shape_BS == (rows, tokens):
            return self
        index_BS = torch.full((rows, tokens), -1)
        index_BS[: self.shape_BS[0], : self.shape_BS[1]] = self._numbers_BS()
        return self.select(index_BS)

    def part(self, number: int, count: int) -> "MicroBatch":
        """A context rank's part: a block of columns of all tensors. `count` must divide the number of columns."""
        return self if count == 1 else self.select(self._numbers_BS().chunk(count, 1)[number])

    def select(self, index_BS: Tensor) -> "MicroBatch":
        """Some rows of the flattened micro-batch, in the shape of `index_BS`. All cutting and padding is done here.

        index_BS: row numbers, on the CPU; -1 is padding.
        """
        index_T = index_BS.flatten()
        weights_T = take(self.weights_T, index_T)
        return replace(
            self,
            inputs=self._select_inputs(self.inputs, index_BS),
            labels_T=take(self.labels_T, index_T, NO_LABEL),
            weights_T=weights_T,
            document_T=take(self.document_T, index_T, -1),
            valid_index=weights_T.nonzero()[:, 0],
            per_token={name: take(each_T, index_T) for name, each_T in self.per_token.items()},
            teacher_inputs=None
            if self.teacher_inputs is None
            else self._select_inputs(self.teacher_inputs, index_BS),
        )

    def to(self, device: torch.device | str) -> "MicroBatch":
        """The same micro-batch on another device."""
        return replace(
            self,
            inputs=_moved(self.inputs, device),
            labels_T=self.labels_T.to(device),
            weights_T=self.weights_T.to(device),
            document_T=self.document_T.to(device),
            valid_index=self.valid_index.to(device),
            per_token=_moved(self.per_token, device),
            teacher_inputs=None if self.teacher_inputs is None else _moved(self.teacher_inputs, device),
        )

    def _numbers_BS(self) -> Tensor:
        return torch.arange(len(self.labels_T)).view(self.shape_BS)

    def _select_inputs(self, inputs: Mapping[str, Tensor], index_BS: Tensor) -> dict[str, Tensor]:
        chosen = dict(inputs)
        for name, value in inputs.items():
            if tuple(value.shape[:2]) == self.shape_BS:
                padding = int(value[0, 0]) if name == "input_ids" else 0
                chosen[name] = take(value.flatten(0, 1), index_BS.flatten(), padding).unflatten(0, index_BS.shape)
        chosen["position_ids"] = _with_padding_positions(chosen["position_ids"], index_BS)
        return chosen


class StepMicroBatches(Sequence[MicroBatch]):
    """All micro-batches of a step, or of a part of an evaluation; the same on every process of a run.

    They are not yet cut or padded for the layout. A subclass may build each one only when it is accessed (`_build`).
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
        return self._build(chosen) if isinstance(chosen, int) else [self._build(each) for each in chosen]

    def _build(self, number: int) -> MicroBatch:
        return self._micro_batches[number]

    @property
    def shapes_BS(self) -> list[tuple[int, int]]:
        """Rows and columns of each micro-batch."""
        return [each.shape_BS for each in self._micro_batches]

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents, without padding and gaps."""
        return sum(int((each.document_T >= 0).sum()) for each in self._micro_batches)

    @property
    def normalizer(self) -> int:
        """The divisor of the step's losses: the number of its target tokens, at least 1."""
        return max(1, sum(each.valid_tokens for each in self._micro_batches))

    def document_tokens(self, document: int) -> np.ndarray:
        """The token ids of a document, by its number in `MicroBatch.document_T`."""
        for each in self._micro_batches:
            if bool((is_of_T := each.document_T == document).any()):
                return each.input_ids_BS.flatten()[is_of_T].cpu().numpy()
        raise ValueError(f"no micro-batch of this step has document {document}")

    def documents_of(self, number: int) -> list[int]:
        """The documents of one of the micro-batches."""
        document_T = self[number].document_T
        return document_T[document_T >= 0].unique().tolist()

    def value(self, document: int, column: str) -> Any:
        """A document's value in a column of the data. Raises ValueError if it is not known."""
        raise ValueError(f"column '{column}' of document {document} is not known: these are only tokens")

    def for_teacher(self, name: str) -> "StepMicroBatches":
        """The same micro-batches, with `teacher_inputs` if this teacher reads a prefix for which there are gaps."""
        return self

    def teacher_tokens(self, document: int, name: str) -> tuple[np.ndarray, int]:
        """All ids that this teacher reads of a document, and by how many its rows are shifted among them.

        With a shift of s, row s + i of the teacher is row i of the document. It does not depend on gaps.
        """
        return self.document_tokens(document), 0


def take(values_T: Tensor, index_T: Tensor, padding: float = 0) -> Tensor:
    """Rows of a tensor [T, …], with `padding` where the index is -1."""
    taken_T = values_T[index_T.clamp(min=0)]
    is_padding_T = (index_T < 0).view(-1, *[1] * (values_T.dim() - 1))
    return taken_T.masked_fill(is_padding_T, padding)


def make_micro_batch(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str] = ()
) -> MicroBatch:
    """Pack documents into a micro-batch. rows: for each row, the numbers of its documents, in their order.

    gaps: the teachers for whose prefixes there is a gap before each document.

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
        per_token={name: torch.from_numpy(each_BS.reshape(-1)) for name, each_BS in per_token_BS.items()},
    )


def teacher_inputs(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str], teacher: str
) -> dict[str, Tensor]:
    """What a teacher of `gaps` that has prefixes reads at the rows of `make_micro_batch(documents, rows, gaps)`."""
    placed, prefixes = _placed(documents, rows, gaps), documents.prefixes[teacher]
    return _packed_inputs(placed, [prefixes.before(each, documents.tokens(each)) for _, each, _ in placed])


def _placed(
    documents: Documents, rows: Sequence[Sequence[int] | np.ndarray], gaps: Sequence[str]
) -> list[tuple[int, int, int]]:
    """(row, document, the column behind its last token) of each document, row by row, from left to right."""
    widths_D = documents.lengths_D + documents.gaps_D(gaps)
    return [
        (row, int(document), int(stop))
        for row, members in enumerate(rows)
        for document, stop in zip(members, np.cumsum(widths_D[np.asarray(members)]), strict=True)
    ]


def _packed_inputs(placed: Sequence[tuple[int, int, int]], ids: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """The tokens `ids` of each placed document, which end where it ends, and between them padding of its own."""
    shape_BS = placed[-1][0] + 1, max(stop for _, _, stop in placed)
    # padding is a token of the data: the gradient of a family with a zero embedding (Gemma 3n, id 0) is not finite
    input_ids_BS = np.full(shape_BS, ids[0][0], dtype=np.int64)
    position_ids_BS = np.zeros(shape_BS, dtype=np.int64)
    ends_B = [0] * shape_BS[0]
    for (row, _, stop), its_ids in zip(placed, ids, strict=True):
        start = stop - len(its_ids)
        input_ids_BS[row, start:stop] = its_ids
        position_ids_BS[row, ends_B[row] : start] = np.arange(start - ends_B[row])
        position_ids_BS[row, start:stop] = np.arange(stop - start)
        ends_B[row] = stop
    for row, end in enumerate(ends_B):
        position_ids_BS[row, end:] = np.arange(shape_BS[1] - end)
    return {"input_ids": torch.from_numpy(input_ids_BS), "position_ids": torch.from_numpy(position_ids_BS)}


def _moved(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: each.to(device) for name, each in tensors.items()}


def _with_padding_positions(position_ids_BS: Tensor, index_BS: Tensor) -> Tensor:
    """Number the positions of the padding at the end of a row from 0, because it is a separate document."""
    tokens_B1 = (index_BS >= 0).sum(1, keepdim=True)
    count_BS = torch.arange(index_BS.shape[1]).expand_as(index_BS) - tokens_B1
    return torch.where(index_BS < 0, count_BS, position_ids_BS)
