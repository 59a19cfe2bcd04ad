"""How much two answers about the same rows differ.

N rows, E the teacher's width, K ids per row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def largest_difference(answers: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> float:
    """The largest difference of any row; NaN if one of them is NaN."""
    return float(torch.cat([row_differences(*pair) for pair in zip(answers, expected, strict=True)]).max())


def row_differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """How much each row differs, [N] from 0 to about 1.

    Of hidden states the relative error; of ids the total variation, where an id that the other one lacks has
    probability 0 there.
    """
    if "hidden" in one:
        one_NE, other_NE = one["hidden"].double(), other["hidden"].double()
        return (one_NE - other_NE).norm(dim=1) / other_NE.norm(dim=1).clamp_min(1e-30)
    one_NK, other_NK = one["log_probs"].double().exp(), other["log_probs"].double().exp()
    same_NKK = one["ids"][:, :, None] == other["ids"][:, None, :]
    shared_NK = (same_NKK * other_NK[:, None, :]).sum(2)
    absent_NK = ~same_NKK.any(1)
    return ((one_NK - shared_NK).abs().sum(1) + (other_NK * absent_NK).sum(1)) / 2
