"""The rows of a micro-batch as a backbone gets them: one document per right-padded row, or all rows joined to one.

`DocumentRows` is for models that cannot be packed. Padding is behind a document's last token. So a causal model needs
no mask, and position ids count from 0 in each row. `JoinedRow` is for functions that separate packed documents only
in a batch of one row.

B rows, S columns of the micro-batch, T = B·S; N documents, L columns of their rows, the longest document's length.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stillhouse.document_lengths import document_starts

#: the number of columns is a multiple of this: fewer shapes, and matrix products of aligned sizes on a GPU
_MULTIPLE = 8


@dataclass(frozen=True, eq=False)
class DocumentRows:
    """The places of a micro-batch's documents in rows.

    index_NL: the place of each row's tokens in the flattened micro-batch; for padding, the row's first token.
    place_T: the place of each token in the flattened rows. Documents without a row have 0.
    shape_BS: rows and columns of the micro-batch.
    """

    index_NL: Tensor
    place_T: Tensor
    shape_BS: tuple[int, int]

    @classmethod
    def of(cls, position_ids_BS: Tensor, is_padding_BS: Tensor | None = None) -> Self:
        """Return the rows of all documents. A document begins where position ids do not continue.

        is_padding_BS: bool. Documents of padding alone get no row; None: all documents get one.
        """
        rows, columns = position_ids_BS.shape
        begins_T = document_starts(position_ids_BS)
        document_T = begins_T.cumsum(0) - 1
        start_N = begins_T.nonzero()[:, 0]
        length_N = start_N.diff(append=start_N.new_tensor([len(begins_T)]))
        if is_padding_BS is None:
            has_row_N = torch.ones_like(start_N, dtype=torch.bool)
        else:
            tokens_N = torch.zeros_like(start_N).index_add_(0, document_T, (~is_padding_BS.flatten()).long())
            has_row_N = tokens_N > 0
            has_row_N[0] |= ~has_row_N.any()  # a micro-batch of padding alone: the backbone runs on one row
        longest = int(length_N[has_row_N].max())
        column_L = torch.arange(-(-longest // _MULTIPLE) * _MULTIPLE, device=start_N.device)
        start_N1 = start_N[has_row_N, None]
        index_NL = start_N1 + torch.where(column_L < length_N[has_row_N, None], column_L, 0)
        row_N = has_row_N.cumsum(0) - 1
        column_T = torch.arange(len(begins_T), device=start_N.device) - start_N[document_T]
        place_T = torch.where(has_row_N[document_T], row_N[document_T] * len(column_L) + column_T, 0)
        return cls(index_NL, place_T, (rows, columns))

    def position_ids(self, position_ids_BS: Tensor) -> Tensor:
        """Return the position ids of the rows' columns, [1, L]."""
        return torch.arange(self.index_NL.shape[1], device=position_ids_BS.device)[None]

    def unpack(self, values_BS: Tensor) -> Tensor:
        """Return values [B, S, …] of the micro-batch as rows [N, L, …]. Padding repeats the row's first token: a
        special token may have an embedding without a finite gradient (Gemma 3n).
        """
        return values_BS.flatten(0, 1)[self.index_NL]

    def pack(self, values_NL: Tensor) -> Tensor:
        """Return values [N, L, …] of rows as a micro-batch [B, S, …]. Documents without a row get any values."""
        return self.pack_tokens(values_NL.flatten(0, 1)).unflatten(0, self.shape_BS)

    def pack_tokens(self, values: Tensor) -> Tensor:
        """Return values [N·L, …] of rows as those of a flattened micro-batch [T, …]."""
        return values[self.place_T]


@dataclass(frozen=True)
class JoinedRow:
    """All rows of a micro-batch, one behind another. Their shape is shape_BS."""

    shape_BS: tuple[int, int]

    def position_ids(self, position_ids_BS: Tensor) -> Tensor:
        """Return the position ids of the row, [1, T]."""
        return self.unpack(position_ids_BS.expand(self.shape_BS))

    def unpack(self, values_BS: Tensor) -> Tensor:
        """Return values [B, S, …] of the micro-batch as those of the row, [1, T, …]."""
        return values_BS.flatten(0, 1)[None]

    def pack(self, values_1T: Tensor) -> Tensor:
        """Return values [1, T, …] of the row as a micro-batch [B, S, …]."""
        return values_1T[0].unflatten(0, self.shape_BS)

    def pack_tokens(self, values: Tensor) -> Tensor:
        """Return values [T, …] of the row as those of a flattened micro-batch [T, …]."""
        return values
