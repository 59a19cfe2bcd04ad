"""A micro-batch as tensors. Labels are shifted here, and nowhere else.

Row t of the flattened batch predicts the token at t+1 of the same document, so a document's last row predicts
nothing, and the row of a prompt's last token predicts the completion's first.

B rows, S tokens per row (the longest of the micro-batch), T = B·S.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.documents import Documents

NO_LABEL = -1


@dataclass(frozen=True)
class Batch:
    """B packed sequences, the shorter ones padded.

    Give the model `position_ids_BS`, no attention mask and `use_cache=False`: positions restart at every
    document, and only then are documents kept apart. The padding of a row is a document of its own, without
    weight.
    """

    input_ids_BS: Tensor  # int64
    position_ids_BS: Tensor  # int64
    labels_T: Tensor  # int64: the token that row t predicts, or -1
    weights_T: Tensor  # float32: 1 where there is a label, else 0
    valid_index: Tensor  # int64: the rows with weight, ascending
    document_T: Tensor  # int64: the document's number in its Documents, -1 for padding
    valid_tokens: int  # how many rows have weight, known without asking the device

    def without_targets(self) -> "Batch":
        """The same tokens, of which none counts."""
        return replace(
            self,
            labels_T=torch.full_like(self.labels_T, NO_LABEL),
            weights_T=torch.zeros_like(self.weights_T),
            valid_index=self.valid_index[:0],
            document_T=torch.full_like(self.document_T, -1),
            valid_tokens=0,
        )

    def padded(self, rows: int, width: int) -> "Batch":
        """With more rows and columns of padding, which is a document of its own in each row."""
        old = self.input_ids_BS.shape
        if old == (rows, width):
            return self

        def grown(tensor: Tensor, fill: int) -> Tensor:
            whole = torch.full((rows, width), fill, dtype=tensor.dtype)
            whole[: old[0], : old[1]] = tensor.view(old)
            return whole

        position_ids_BS = grown(self.position_ids_BS, 0)
        position_ids_BS[:, old[1] :] = torch.arange(width - old[1])
        position_ids_BS[old[0] :] = torch.arange(width)
        weights_T = grown(self.weights_T, 0).flatten()
        return replace(
            self,
            input_ids_BS=grown(self.input_ids_BS, 0),
            position_ids_BS=position_ids_BS,
            labels_T=grown(self.labels_T, NO_LABEL).flatten(),
            weights_T=weights_T,
            valid_index=weights_T.nonzero()[:, 0],
            document_T=grown(self.document_T, -1).flatten(),
        )

    def part(self, number: int, count: int) -> "Batch":
        """A context rank's part: columns of each sequence, labels and all. `count` divides the sequences' length."""
        if count == 1:
            return self
        shape_BS = self.input_ids_BS.shape
        cut: dict[str, Any] = {
            name: getattr(self, name).view(shape_BS).chunk(count, 1)[number].contiguous()
            for name in ("input_ids_BS", "position_ids_BS", "labels_T", "weights_T", "document_T")
        }
        flat = {name: value.flatten() for name, value in cut.items() if name.endswith("_T")}
        valid_index = flat["weights_T"].nonzero()[:, 0]
        return replace(self, **(cut | flat), valid_index=valid_index, valid_tokens=len(valid_index))

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def make_batch(documents: Documents, rows: Sequence[Sequence[int] | np.ndarray]) -> Batch:
    """Pack these documents, one list of numbers per row, in that order. Every row needs a document."""
    if not rows or not all(len(row) for row in rows):
        raise ValueError("a batch needs at least one row, and each row at least one document")
    width = max(int(documents.lengths_D[np.asarray(row)].sum()) for row in rows)
    shape = (len(rows), width)
    input_ids_BS = np.zeros(shape, dtype=np.int64)
    position_ids_BS = np.zeros(shape, dtype=np.int64)
    labels_BS = np.full(shape, NO_LABEL, dtype=np.int64)
    document_BS = np.full(shape, -1, dtype=np.int64)
    for row, members in enumerate(rows):
        start = 0
        for document in members:
            ids, targets = documents.tokens(document), documents.targets(document)
            stop = start + len(ids)
            input_ids_BS[row, start:stop] = ids
            position_ids_BS[row, start:stop] = np.arange(len(ids))
            labels_BS[row, start : stop - 1] = np.where(targets[1:], ids[1:], NO_LABEL)
            document_BS[row, start:stop] = document
            start = stop
        position_ids_BS[row, start:] = np.arange(width - start)
    labels_T = torch.from_numpy(labels_BS.reshape(-1))
    valid_index = torch.from_numpy(np.flatnonzero(labels_BS >= 0))
    return Batch(
        input_ids_BS=torch.from_numpy(input_ids_BS),
        position_ids_BS=torch.from_numpy(position_ids_BS),
        labels_T=labels_T,
        weights_T=(labels_T >= 0).float(),
        valid_index=valid_index,
        document_T=torch.from_numpy(document_BS.reshape(-1)),
        valid_tokens=len(valid_index),
    )
