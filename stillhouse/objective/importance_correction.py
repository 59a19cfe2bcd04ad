"""Importance weights for sampled tokens whose probability has changed since they were sampled.

An engine samples a token y with probability q_old(y). In training, the student's probability q(y) differs: the
weights are newer, or the engine uses other kernels. Weighting by the ratio ρ = q(y) / q_old(y) turns an expectation
over q_old into one over q, but a few large ratios would dominate a step. So ratios are limited:

    truncated   min(ρ, limit)                            truncated importance sampling (TIS, Yao et al. 2025)
    masked      ρ if 1/limit ≤ ρ ≤ limit, otherwise 0    IcePop (Ring-1T, arXiv:2510.18855)

The weight is a constant: no gradient flows through it. C rows of a chunk.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

CorrectionKind = Literal["none", "truncated", "masked"]


@dataclass(frozen=True)
class Correction:
    """How the weight depends on the ratio ρ. kind: as above; "none": every weight is 1. limit: a number above 1."""

    kind: CorrectionKind = "none"
    limit: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"correction {self.kind!r}: expected one of {', '.join(get_args(CorrectionKind))}")
        if isinstance(self.limit, bool) or not self.limit > 1:
            raise ValueError(f"limit={self.limit} of the correction: expected a number above 1 (infinity for none)")

    def weights(self, ratio_C: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight of each ratio, and a mask of the weights that the limit changed. Ratios may be inf."""
        if self.kind == "none":
            return torch.ones_like(ratio_C), torch.zeros_like(ratio_C, dtype=torch.bool)
        is_changed_C = ratio_C > self.limit
        if self.kind == "truncated":
            return ratio_C.clamp(max=self.limit), is_changed_C
        # with an infinite limit, only an infinite ratio is changed
        is_changed_C = is_changed_C | (ratio_C < 1 / self.limit) | (ratio_C == math.inf)
        return ratio_C.masked_fill(is_changed_C, 0.0), is_changed_C


NO_CORRECTION = Correction()
