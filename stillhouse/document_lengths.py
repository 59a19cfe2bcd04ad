"""Finds the documents in the rows of a micro-batch from its position ids.

B rows, S columns, T = B·S; N documents, M = N + 1 borders of documents; K documents with a token that is not padding.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class DocumentLengths(NamedTuple):
    """The lengths of a micro-batch's documents in the form that attention kernels read. All rows are concatenated.

    borders_M: int32, the token positions at which documents begin and end (`cu_seqlens`), from 0 to T.
    longest: the length of the longest document.
    filled_K: int64, the indices of the K documents with a token that is not padding; at least one index.
    filled: the lengths of the K documents.
    """

    borders_M: Tensor
    longest: int
    filled_K: Tensor
    filled: tuple[int, ...]

    @classmethod
    def of(cls, position_ids_BS: Tensor, is_padding_BS: Tensor | None = None) -> Self:
        """Compute the lengths from position ids. The host waits for the device of the position ids.

        is_padding_BS: bool, or None without padding. If all tokens are padding, `filled_K` is [0].
        """
        begins_T = document_starts(position_ids_BS)
        starts_N = begins_T.nonzero()[:, 0]
        borders_M = torch.cat([starts_N, starts_N.new_tensor([position_ids_BS.numel()])]).int()
        is_filled_N = torch.ones_like(starts_N, dtype=torch.bool)
        if is_padding_BS is not None:
            tokens_N = torch.zeros_like(starts_N)
            tokens_N.index_add_(0, begins_T.cumsum(0) - 1, (~is_padding_BS.flatten()).long())
            is_filled_N = tokens_N > 0
            is_filled_N[0] |= ~is_filled_N.any()
        filled_K, length_N = is_filled_N.nonzero()[:, 0], borders_M.diff()
        return cls(borders_M, int(length_N.max()), filled_K, tuple(length_N[filled_K].tolist()))


def document_starts(position_ids_BS: Tensor) -> Tensor:
    """Return for each token of the flattened micro-batch whether a document begins with it, bool [T].

    A document begins in the first column of a row, and where a position id is not the previous position id plus 1.
    """
    begins_BS = torch.ones_like(position_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = position_ids_BS[:, 1:] != position_ids_BS[:, :-1] + 1
    return begins_BS.flatten()


def require_separable(position_ids: Tensor, attention_mask: Tensor) -> None:
    """Raise ValueError if a row contains several documents, and the attention mask cannot separate them."""
    if attention_mask.dim() != 2:  # a mask with a value for each pair of tokens can separate documents
        return
    tokens = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    if bool((tokens & (position_ids[:, 1:] <= position_ids[:, :-1])).any()):
        raise ValueError(
            "position_ids restart within a row and an attention_mask is given, with which the row's documents "
            "see each other: expected attention_mask=None for packed rows, in which padding has position_ids from 0 "
            "like a document"
        )
