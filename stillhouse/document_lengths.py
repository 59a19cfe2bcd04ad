"""Where documents begin in the rows of a micro-batch, which only its position ids say.

B rows, S columns, T = B·S; N documents, M = N + 1 borders of documents.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class DocumentLengths(NamedTuple):
    """The lengths of a micro-batch's documents when its rows are joined to one, as attention kernels read them.

    borders_M: int32, the places at which the documents begin and end (`cu_seqlens`), from 0 to T.
    longest: the length of the longest document.
    """

    borders_M: Tensor
    longest: int

    @classmethod
    def of(cls, position_ids_BS: Tensor) -> Self:
        """Read the lengths from position ids. Waits for the device of the position ids."""
        starts_N = document_starts(position_ids_BS).nonzero()[:, 0]
        borders_M = torch.cat([starts_N, starts_N.new_tensor([position_ids_BS.numel()])]).int()
        return cls(borders_M, int(borders_M.diff().max()))


def document_starts(position_ids_BS: Tensor) -> Tensor:
    """Return whether a document begins at a token of the flattened micro-batch, bool [T]: where position ids do not
    continue, and at the first column of each row.
    """
    begins_BS = torch.ones_like(position_ids_BS, dtype=torch.bool)
    begins_BS[:, 1:] = position_ids_BS[:, 1:] != position_ids_BS[:, :-1] + 1
    return begins_BS.flatten()
