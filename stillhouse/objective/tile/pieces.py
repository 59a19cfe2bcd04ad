"""Sums over the vocabulary on a GPU: over pieces of a row that fit into registers, so that a tile is read once.

The first sweep needs the largest logit of a row before it can add e^(logit − largest). Over a whole row, a kernel
reads the row twice. A piece stays in registers between the two steps. Pieces are combined as the parts of several
ranks are (`statistics.merged`), so every divergence and every term has this sweep.

B rows of a block, V vocabulary on this rank, P pieces, X statistics of a row, in the plan's order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.objective.tile.pointwise import normalized_sums, raw_sums
from stillhouse.objective.tile.statistics import merged
from stillhouse.objective.tile.tile_plan import PointwisePlan

#: device types on which sums are computed by pieces
PIECED = {"cuda"}
#: columns of a piece: the largest number for which torch's compiler keeps a row in registers
PIECE = 1024


def pieced_raw_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor]) -> Tensor:
    """Return `raw_sums` [B, X] by way of the sums of pieces."""
    whole, rest = _pieces(tiles_BV)
    sums = [raw_sums(plan, whole)] if whole[0].numel() else []
    if rest[0].shape[1] or not sums:
        sums.append(raw_sums(plan, rest)[:, None])
    return merged(plan, torch.cat(sums, 1).transpose(0, 1))


def pieced_normalized_sums(plan: PointwisePlan, tiles_BV: Sequence[Tensor], normalizers_BX: Tensor) -> Tensor:
    """Return `normalized_sums` [B, 2·pairs] by way of the sums of pieces."""
    whole, rest = _pieces(tiles_BV)
    sums_BX = normalized_sums(plan, rest, normalizers_BX)
    if whole[0].numel():
        sums_BX = sums_BX + normalized_sums(plan, whole, normalizers_BX[:, None]).sum(1)
    return sums_BX


def _pieces(tiles_BV: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the whole pieces of the tiles, [B, P, PIECE], and the columns after them, [B, fewer than PIECE]."""
    border = tiles_BV[0].shape[1] // PIECE * PIECE
    whole = [tile_BV[:, :border].unflatten(1, (border // PIECE, PIECE)) for tile_BV in tiles_BV]
    return whole, [tile_BV[:, border:] for tile_BV in tiles_BV]
