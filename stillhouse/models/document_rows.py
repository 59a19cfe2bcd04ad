"""The rows of a micro-batch as a backbone gets them: one document per right-padded row, or all rows joined to one.

`UnpackedRows` is for models that cannot be packed. Padding is behind a document's last token. So a causal model needs
no mask, and position ids count from 0 in each row. `JoinedRow` is for functions that separate packed documents only
in a batch of one row.

B rows, S columns of the micro-batch, T = B·S; N documents, F of which are not padding alone, L columns of their rows,
the longest document's length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from stillhouse.document_lengths import DocumentLengths, document_starts

#: the number of columns is a multiple of this: fewer shapes, and matrix products of aligned sizes on a GPU
COLUMNS = 8


@dataclass(frozen=True, eq=False)
class UnpackedRows:
    """The places of a micro-batch's documents in rows of one document, or in one row of all documents (N = 1).

    index_NL: the place of each row's tokens in the flattened micro-batch; for padding, the document's first token, or
        its first one that is no placeholder of an image. place_T: the place of each token in the flattened rows; 0 in
        documents without a place. shape_BS: rows and columns of the micro-batch.
    """

    index_NL: Tensor
    place_T: Tensor
    shape_BS: tuple[int, int]

    @classmethod
    def of(
        cls,
        position_ids_BS: Tensor,
        is_padding_BS: Tensor | None = None,
        lengths: DocumentLengths | None = None,
        multiple: int = COLUMNS,
        widths: Sequence[int] | None = None,
        is_placeholder_BS: Tensor | None = None,
    ) -> Self:
        """Return the rows of all documents. A document begins where position ids do not continue.

        is_padding_BS: bool. Documents of padding alone get no row, except for the first document if all are padding:
            the backbone runs on one row. None: all documents get one.
        lengths: those of the documents, with this padding; None: they are read, which waits for the device.
        multiple: of the number of the rows' columns. is_placeholder_BS: bool, tokens that cannot be padding.
        widths: the columns that each document gets in one row of all; None: each document has a row of its own.
        """
        if lengths is None or is_padding_BS is None:
            lengths = DocumentLengths.of(position_ids_BS, is_padding_BS)
        rows, columns = position_ids_BS.shape
        document_T = document_starts(position_ids_BS).cumsum(0) - 1
        start_N, length_N = lengths.borders_M[:-1].long(), lengths.borders_M.diff().long()
        filled_F, number_F = lengths.filled_K, torch.arange(len(lengths.filled), device=start_N.device)
        # the document of each place, the place's number in its document, and where each document begins
        if widths is None:
            column_L = torch.arange(-(-lengths.longest_filled // multiple) * multiple, device=start_N.device)
            document_NL, column_NL, offset_F = number_F[:, None], column_L[None], number_F * len(column_L)
        else:
            width_F = torch.tensor(widths, device=start_N.device)
            offset_F = width_F.cumsum(0) - width_F
            document_NL = number_F.repeat_interleave(width_F, output_size=sum(widths))[None]
            column_NL = torch.arange(sum(widths), device=start_N.device)[None] - offset_F[document_NL]
        filled_NL = filled_F[document_NL]
        is_token_NL = column_NL < length_N[filled_NL]
        index_NL = start_N[filled_NL] + torch.where(is_token_NL, column_NL, 0)
        if is_placeholder_BS is not None:
            assert widths is None, "a row of several documents with images"
            first_N = (~is_placeholder_BS.flatten()[index_NL]).int().argmax(1, keepdim=True)
            index_NL = torch.where(is_token_NL, index_NL, index_NL.gather(1, first_N))
        offset_N = torch.full_like(start_N, -1).index_copy_(0, filled_F, offset_F)
        column_T = torch.arange(len(document_T), device=start_N.device) - start_N[document_T]
        place_T = torch.where(offset_N[document_T] >= 0, offset_N[document_T] + column_T, 0)
        return cls(index_NL, place_T, (rows, columns))

    def position_ids(self, position_ids_BS: Tensor) -> Tensor:
        """Return the position ids of the rows' columns, [1, L]."""
        return torch.arange(self.index_NL.shape[1], device=position_ids_BS.device)[None]

    def unpack(self, values_BS: Tensor) -> Tensor:
        """Return values [B, S, …] of the micro-batch as rows [N, L, …]. Padding repeats a token of the row: a special
        token may have an embedding without a finite gradient (Gemma 3n).
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
