"""Micro-batches: packed sequences as tensors, which do not depend on any loss; and the micro-batches of a step.

`packed_rows.py` builds micro-batches.

B rows, S columns per row (the length of the longest row), T = B·S.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import DocumentMedia
from stillhouse.document_lengths import DocumentLengths

NO_LABEL = -1
#: the address of each tensor in a buffer is a multiple of this number of bytes
_ALIGNMENT = 16
_POSITIONS = {"position_ids", "axis_position_ids"}


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B packed sequences. The shorter sequences are padded.

    inputs: arguments of a model's forward, always with `input_ids` and `position_ids`, [B, S] int64. Positions
        restart at every document. They separate documents only if the model gets no attention mask and
        `use_cache=False`. The padding of a row has the positions of a separate document, and so does each gap
        (`packed_rows.py`). A tensor whose first two dims are not [B, S] has no token dim and is never cut. For models
        that read media, there can also be `mm_token_type_ids` or `token_type_ids` [B, S], which are 0 in padding, and
        `axis_position_ids` [B, S, A] int64, the rotary positions on A axes. In padding and in documents without
        media, the positions on all axes equal `position_ids`.
    media: arguments of a model's forward that belong to media, such as `pixel_values`, in the order of the documents
        in the flattened rows. They have no token dim, so they are never cut or padded.
    labels_T: int64, the token that row t predicts, or -1 if the row predicts nothing.
    weights_T: float32, the weight of the label (1 if `Documents.weights_N` is None), or 0 without a label.
    document_T: int64, the document's number in its `Documents`; -1 for padding.
    valid_index: int64, the rows with a non-zero weight, ascending.
    per_token: additional tensors [T, …], such as advantages and old log-probabilities.
    teacher_inputs, teacher_media, teacher_document_T: like `inputs`, `media` and `document_T`, if the teacher reads
        other tokens or media than the student. `teacher_media` and `teacher_document_T` are only used if there are
        `teacher_inputs`. After the last media of a document, a token has the same row number for student and teacher.
    teacher_shift_T: int64. The teacher's row t + teacher_shift_T[t] predicts the same token as the student's row t.
        If it is None, the shift is 0 everywhere. For rows without a target, the shift has no meaning.
    lengths, teacher_lengths: the lengths of the documents in `inputs` and `teacher_inputs`. In the shard of a context
        rank, they are the lengths of the whole documents. They are None until `part` or `to` computes them, on the
        CPU, so that reading them never waits for the device.

    Raises ValueError if the tensors do not have the same number of rows.
    """

    inputs: Mapping[str, Tensor]
    labels_T: Tensor
    weights_T: Tensor
    document_T: Tensor
    valid_index: Tensor
    per_token: Mapping[str, Tensor] = field(default_factory=dict)
    teacher_inputs: Mapping[str, Tensor] | None = None
    lengths: DocumentLengths | None = None
    teacher_lengths: DocumentLengths | None = None
    media: Mapping[str, Tensor] = field(default_factory=dict)
    teacher_media: Mapping[str, Tensor] = field(default_factory=dict)
    teacher_document_T: Tensor | None = None
    teacher_shift_T: Tensor | None = None

    def __post_init__(self) -> None:
        for inputs in (self.inputs, self.teacher_inputs or self.inputs):
            for name in ("input_ids", "position_ids"):
                shape = tuple(inputs[name].shape) if name in inputs else None
                if shape != self.shape_BS:
                    raise ValueError(f"{name} of a micro-batch has shape {shape}: expected {self.shape_BS}")
        rows, count = self.shape_BS
        tensors = {name: getattr(self, name) for name in ("labels_T", "weights_T", "document_T")}
        for name, value in (tensors | dict(self.per_token)).items():
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
    def is_padding_BS(self) -> Tensor:
        """True for each token that belongs to no document, bool."""
        return (self.document_T < 0).view(self.shape_BS)

    @property
    def valid_tokens(self) -> int:
        """The number of rows with a non-zero weight, known without waiting for the device."""
        return len(self.valid_index)

    @property
    def as_read_by_teacher(self) -> "MicroBatch":
        """This micro-batch with the teacher's inputs in place of the student's."""
        if self.teacher_inputs is None:
            return self
        document_T = self.document_T if self.teacher_document_T is None else self.teacher_document_T
        inputs, lengths, media = self.teacher_inputs, self.teacher_lengths, self.teacher_media
        return replace(self, inputs=inputs, lengths=lengths, media=media, document_T=document_T)

    def in_student_rows(self, values_BS: Tensor) -> Tensor:
        """Move values [B, S, …] from the teacher's rows to the student's rows that predict the same tokens."""
        if self.teacher_shift_T is None:
            return values_BS
        row_T = torch.arange(len(self.teacher_shift_T), device=values_BS.device) + self.teacher_shift_T
        return values_BS.flatten(0, 1)[row_T].unflatten(0, self.shape_BS)

    def without_targets(self) -> "MicroBatch":
        """This micro-batch with its tokens as padding: without labels, weights, documents and media."""
        return replace(
            self,
            labels_T=torch.full_like(self.labels_T, NO_LABEL),
            weights_T=torch.zeros_like(self.weights_T),
            document_T=torch.full_like(self.document_T, -1),
            valid_index=self.valid_index[:0],
            lengths=None,
            teacher_lengths=None,
            media={},
            teacher_media={},
            teacher_document_T=None,
        )

    def padded(self, rows: int, tokens: int) -> "MicroBatch":
        """Pad to `rows` rows and `tokens` columns. A row's padding is a separate document."""
        if self.shape_BS == (rows, tokens):
            return self
        index_BS = torch.full((rows, tokens), -1)
        index_BS[: self.shape_BS[0], : self.shape_BS[1]] = torch.arange(len(self.labels_T)).view(self.shape_BS)
        return self.select(index_BS)

    def part(self, number: int, count: int) -> "MicroBatch":
        """Shard `number` of `count` for context ranks: a block of columns, and all media. `count` must divide S."""
        if count == 1:
            return self
        numbers_BS, whole = torch.arange(len(self.labels_T)).view(self.shape_BS), self.with_lengths()
        columns = self.select(numbers_BS.chunk(count, 1)[number])
        return replace(columns, lengths=whole.lengths, teacher_lengths=whole.teacher_lengths)

    def with_lengths(self) -> "MicroBatch":
        """This micro-batch with the lengths of its documents."""
        if self.lengths is not None:
            return self
        lengths = DocumentLengths.of(self.position_ids_BS, self.is_padding_BS)
        if self.teacher_inputs is None:
            return replace(self, lengths=lengths)
        read = self.as_read_by_teacher
        teacher_lengths = DocumentLengths.of(read.position_ids_BS, read.is_padding_BS)
        return replace(self, lengths=lengths, teacher_lengths=teacher_lengths)

    def select(self, index_BS: Tensor) -> "MicroBatch":
        """Select rows of the flattened micro-batch. index_BS: the rows' numbers, on the CPU; -1 selects padding."""
        index_T = index_BS.flatten()
        weights_T = take(self.weights_T, index_T)
        return replace(
            self,
            inputs=self._select_inputs(self.inputs, index_BS),
            labels_T=take(self.labels_T, index_T, NO_LABEL),
            weights_T=weights_T,
            document_T=take(self.document_T, index_T, -1),
            valid_index=weights_T.nonzero()[:, 0],
            per_token={name: take(values_T, index_T) for name, values_T in self.per_token.items()},
            teacher_inputs=self.teacher_inputs and self._select_inputs(self.teacher_inputs, index_BS),
            lengths=None,
            teacher_lengths=None,
            teacher_document_T=None
            if self.teacher_document_T is None
            else take(self.teacher_document_T, index_T, -1),
            teacher_shift_T=None if self.teacher_shift_T is None else take(self.teacher_shift_T, index_T),
        )

    def to(self, device: torch.device | str) -> "MicroBatch":
        """This micro-batch on another device, with the lengths of its documents."""
        values = vars(self.with_lengths())
        moved = _copies(_tensors(values.values()), torch.device(device))
        return replace(self, **{name: _replaced(value, moved) for name, value in values.items()})

    def _select_inputs(self, inputs: Mapping[str, Tensor], index_BS: Tensor) -> dict[str, Tensor]:
        chosen = dict(inputs)
        for name, value in inputs.items():
            if tuple(value.shape[:2]) == self.shape_BS:
                padding = int(value[0, 0]) if name == "input_ids" else 0
                chosen[name] = take(value.flatten(0, 1), index_BS.flatten(), padding).unflatten(0, index_BS.shape)
        for name in _POSITIONS & chosen.keys():
            # the positions of a row's padding begin at 0, because the padding is a separate document
            positions = chosen[name]
            tokens_B1 = (index_BS >= 0).sum(1, keepdim=True)
            count_BS = torch.arange(index_BS.shape[1]).expand_as(index_BS) - tokens_B1
            shape = index_BS.shape + (1,) * (positions.dim() - 2)
            chosen[name] = torch.where(index_BS.view(shape) < 0, count_BS.reshape(shape), positions)
        return chosen


def take(values_T: Tensor, index_T: Tensor, padding: float = 0) -> Tensor:
    """Rows of a tensor [T, …], with `padding` where the index is -1."""
    taken_T = values_T[index_T.clamp(min=0)]
    is_padding_T = (index_T < 0).view(-1, *[1] * (values_T.dim() - 1))
    return taken_T.masked_fill(is_padding_T, padding)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(value.values())
    elif isinstance(value, Iterable):
        for member in value:
            yield from _tensors(member)


def _replaced(value: Any, moved: Mapping[int, Tensor]) -> Any:
    """The value with new tensors. moved: the new tensors, by the `id` of the tensors that they replace."""
    if isinstance(value, Mapping):
        return {name: moved[id(tensor)] for name, tensor in value.items()}
    if isinstance(value, DocumentLengths):
        return DocumentLengths(*(_replaced(member, moved) for member in value))
    return moved[id(value)] if isinstance(value, Tensor) else value


def _copies(tensors: Iterable[Tensor], device: torch.device) -> dict[int, Tensor]:
    """The tensors on a device, by the `id` of the original tensor. A CUDA device gets all tensors in one asynchronous
    copy from pinned memory.
    """
    by_id = {id(tensor): tensor for tensor in tensors}
    if device.type != "cuda" or not all(tensor.device.type == "cpu" for tensor in by_id.values()):
        return {key: tensor.to(device) for key, tensor in by_id.items()}
    ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in by_id.values()))

    def views(buffer: Tensor) -> list[Tensor]:
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip([0, *ends], by_id.values(), strict=False)
        ]

    buffer = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    for value, tensor in zip(views(buffer), by_id.values(), strict=True):
        value.copy_(tensor)
    return dict(zip(by_id, views(buffer.to(device, non_blocking=True)), strict=True))


class StepMicroBatches(Sequence[MicroBatch]):
    """All micro-batches of a step, or of a part of an evaluation. Every process of a run has all of them.

    A subclass can override `_build` to build a micro-batch at each access.
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
        return [micro_batch.shape_BS for micro_batch in self._micro_batches]

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents, without padding and gaps."""
        return sum(int((micro_batch.document_T >= 0).sum()) for micro_batch in self._micro_batches)

    @property
    def targets(self) -> int:
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
        """The media of a document, by its number in `MicroBatch.document_T`; None if it has no media."""
        if any(micro_batch.media for micro_batch in self._micro_batches):
            raise ValueError(f"the images of document {document} are not known: its micro-batch has only tensors")
        return None

    def documents_of(self, number: int) -> list[int]:
        document_T = self[number].document_T
        return document_T[document_T >= 0].unique().tolist()

    def value(self, document: int, column: str) -> Any:
        """A document's value in a column of the data. Raises ValueError if the column was not kept."""
        raise ValueError(f"column '{column}' of document {document} is not known: its micro-batch has only tensors")

    def for_teacher(self, name: str) -> "StepMicroBatches":
        """The same data, with this teacher's `teacher_inputs` if it reads other tokens or media than the student."""
        return self

    def teacher_tokens(self, document: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids that this teacher reads for a document; and, for each of the student's rows, the teacher's row that
        predicts the same token (see `Substitutions.rows`). Rows are counted from the document's first token.
        """
        ids = self.document_tokens(document)
        return ids, np.arange(len(ids))
