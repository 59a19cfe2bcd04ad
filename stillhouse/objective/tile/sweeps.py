"""The sweeps over a chunk's tiles, by a Triton kernel or in blocks of rows, and the logits at ids.

C rows of a chunk, V vocabulary on this rank, P pieces, R ranks, N ids per row, X numbers of a row.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stillhouse.objective.tile import kernels
from stillhouse.objective.tile.compiled import pointwise
from stillhouse.objective.tile.pointwise import gradient, normalized_sums, raw_sums
from stillhouse.objective.tile.statistics import statistics
from stillhouse.objective.tile.tile_plan import PointwisePlan

#: bytes of the block of logits that one CPU thread processes at a time, so that it fits into the second-level cache
BLOCK_BYTES = 1 << 20


def sweep_raw_sums(plan: PointwisePlan, tiles_CV: Sequence[Tensor]) -> Tensor:
    """Return `raw_sums` over this rank's part of the vocabulary, [C, X]."""
    if kernels.has_kernels(plan, tiles_CV):
        return kernels.kernel_raw_sums(plan, tiles_CV)
    return torch.cat(by_blocks(raw_sums, plan, tiles_CV))


def sweep_normalized_sums(plan: PointwisePlan, tiles_CV: Sequence[Tensor], normalizers_CX: Tensor) -> Tensor:
    """Return `normalized_sums` over this rank's part of the vocabulary, [C, X]."""
    if kernels.has_kernels(plan, tiles_CV):
        return kernels.kernel_normalized_sums(plan, tiles_CV, normalizers_CX)
    return torch.cat(by_blocks(normalized_sums, plan, tiles_CV, normalizers_CX))


def sweep_gradient(
    plan: PointwisePlan, tiles_CV: Sequence[Tensor], rows_CX: Tensor, rounded_CV: Tensor | None
) -> None:
    """Write `pointwise.gradient` to `rounded_CV` or, if this is None, over the first tile."""
    if kernels.has_kernels(plan, tiles_CV):
        kernels.kernel_gradient(plan, tiles_CV, rows_CX, rounded_CV)
    else:
        by_blocks(gradient, plan, tiles_CV, rows_CX, *([] if rounded_CV is None else [rounded_CV]))


def by_blocks(
    function: Callable[..., Any], plan: PointwisePlan, tiles_CV: Sequence[Tensor], *rest: Tensor
) -> list[Any]:
    """Call a function of `pointwise.py` for each block of rows, and return the results."""
    return [
        pointwise(function, plan, [tile_CV[block] for tile_CV in tiles_CV], *(rows_CX[block] for rows_CX in rest))
        for block in row_blocks(tiles_CV[0])
    ]


def row_blocks(tile_CV: Tensor) -> Iterator[slice]:
    """Return at least one block of rows, which may be empty. On a GPU the whole chunk is one block."""
    rows, columns = tile_CV.shape
    size = max(rows, 1)
    if tile_CV.device.type == "cpu":
        per_thread = BLOCK_BYTES // (max(columns, 1) * tile_CV.element_size())
        size = torch.get_num_threads() * max(per_thread, 2)
    return (slice(start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


def sums_and_logits(
    plan_and_first: tuple[PointwisePlan, int], sums_CPX: Tensor, logits_CV: Tensor, ids: Sequence[Tensor]
) -> Tensor:
    """Return the raw sums of the rows, and the logits at ids, in one tensor [C, X]; −inf at ids of other ranks.

    plan_and_first: the plan, and the first id on this rank. sums_CPX: the raw sums of the pieces of each row.
    """
    plan, first = plan_and_first
    sums = [sums_CPX[:, 0] if sums_CPX.shape[1] == 1 else kernels.merged_pieces(plan, sums_CPX)]
    for ids_CN in ids:
        if logits_CV.shape[1] == 0:
            sums.append(logits_CV.new_full(ids_CN.shape, -math.inf))
        else:
            local_CN, is_here_CN = columns_of(ids_CN, first, logits_CV)
            sums.append(logits_CV.gather(1, local_CN).masked_fill(~is_here_CN, -math.inf))
    return torch.cat(sums, 1)


def normalizers(plan: PointwisePlan, raw_CRX: Tensor, outside: Sequence[Tensor]) -> Tensor:
    """Return `RowStatistics.normalizers_CX`, computed from the sums of all ranks."""
    return statistics(
        plan, raw_CRX.transpose(0, 1), [sums_CR2.transpose(0, 1) for sums_CR2 in outside]
    ).normalizers_CX


def columns_of(ids_CN: Tensor, first: int, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids' columns in this rank's tile (0 for other ranks' ids), and a mask of this rank's ids."""
    local_CN = ids_CN.long() - first
    is_here_CN = (local_CN >= 0) & (local_CN < logits_CV.shape[1])
    return torch.where(is_here_CN, local_CN, 0), is_here_CN
