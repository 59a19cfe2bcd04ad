"""Draws ids from a teacher's distribution (random sampling distillation, arXiv 2503.16870).

The uniform numbers for the draws come from a counter-based generator whose key is the document's id. So the draws of
a row do not depend on the batch or the process.

C rows, E the teacher's width, V vocabulary, M draws per row.
"""

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.signals.id_log_probs import ROWS


def uniform_numbers(document: bytes, rows: range, draws: int) -> np.ndarray:
    """Numbers in [0, 1) for some rows of a document, [rows, draws] float64. document: its id of 16 bytes

    The numbers are computed from the generator's raw output, which is the same in all versions of numpy.
    """
    generator = np.random.Philox(key=int.from_bytes(document, "little"))
    raw = generator.random_raw(rows.stop * draws).reshape(rows.stop, draws)[rows.start :]
    return (raw >> np.uint64(11)) * 2.0**-53


def draw(hidden_CE: Tensor, head: OutputHead, uniform_CM: Tensor, temperature: float) -> dict[str, Tensor]:
    """Draw M ids per row with replacement, by inverting the cumulative distribution in float64.

    Returns ids [C, M] and counts [C, M] as `distinct` does. A row has no ids if one of its logits is NaN or +inf, or
    if all logits are −inf. Raises ValueError if the head is sharded over ranks.
    """
    if head.shard is not None and not head.shard.is_alone:
        raise ValueError("draws need the whole vocabulary on one rank: expected tensor=1, or another signal")
    draws = uniform_CM.shape[1]
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    ids, counts = [torch.zeros(0, draws, dtype=torch.int32)], [torch.zeros(0, draws, dtype=torch.uint8)]
    for rows_CE, chunk_CM in zip(hidden_CE.split(ROWS // 4), uniform_CM.split(ROWS // 4), strict=True):
        logits_CV = projection.logits(rows_CE).double().div_(temperature)
        cumulative_CV = logits_CV.sub_(logits_CV.amax(1, keepdim=True)).exp_().cumsum(1)
        total_C1 = cumulative_CV[:, -1:].contiguous()
        ids_CM = torch.searchsorted(cumulative_CV, chunk_CM.to(total_C1) * total_C1, right=True)
        # if the product rounds to the total, the draw is the last id with a mass above 0
        ids_CM = torch.minimum(ids_CM, torch.searchsorted(cumulative_CV, total_C1))
        distinct_CM, counts_CM = distinct(ids_CM.cpu())
        undefined_C = ~total_C1[:, 0].isfinite().cpu()
        ids.append(distinct_CM.masked_fill(undefined_C[:, None], -1))
        counts.append(counts_CM.masked_fill(undefined_C[:, None], 0))
    return {"ids": torch.cat(ids), "counts": torch.cat(counts)}


def distinct(ids_CM: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids of each row in ascending order, padded with -1, int32; their counts, padded with 0, uint8."""
    sorted_CM = ids_CM.sort(1).values
    is_new_CM = torch.ones_like(sorted_CM, dtype=torch.bool)
    is_new_CM[:, 1:] = sorted_CM[:, 1:] != sorted_CM[:, :-1]
    place_CM = is_new_CM.cumsum(1) - 1
    distinct_CM = torch.full_like(sorted_CM, -1).scatter_(1, place_CM, sorted_CM)
    counts_CM = torch.zeros_like(sorted_CM).scatter_add_(1, place_CM, torch.ones_like(sorted_CM))
    return distinct_CM.int(), counts_CM.to(torch.uint8)
