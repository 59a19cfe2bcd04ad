"""The divergences by name, and the parser for expressions of them.

The formulas and their sources are in `formulas.py`. p is the teacher's probability, q the student's.
"""

import operator
from collections.abc import Callable, Sequence
from functools import reduce

from stillhouse.objective.alpha_beta import alpha_beta_class
from stillhouse.objective.expression import Summand, parse_sum, unknown_name
from stillhouse.objective.formulas import (
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    TotalVariation,
)


def forward_kl() -> Divergence:
    """KL(p‖q): the student must cover everything that the teacher covers. Tokens with p = 0 add nothing."""
    return ForwardKL()


def reverse_kl() -> Divergence:
    """KL(q‖p): the student must avoid what the teacher avoids. Infinite if a token has q > 0 and p = 0."""
    return ReverseKL()


def jsd(beta: float, normalized: bool = False) -> Divergence:
    """β·KL(p‖m) + (1 − β)·KL(q‖m) with m = βp + (1 − β)q, for β strictly between 0 and 1.

    It tends to 0 for β → 0 and β → 1. `normalized=True` divides by β(1 − β); the result tends to forward KL for β → 0
    and to reverse KL for β → 1.
    """
    return JensenShannon(beta, normalized)


def skew_forward_kl(alpha: float) -> Divergence:
    """KL(p‖m) with m = αp + (1 − α)q; α = 0 is forward KL (DistiLLM, equation 4)."""
    return SkewForwardKL(alpha)


def skew_reverse_kl(alpha: float) -> Divergence:
    """KL(q‖m) with m = (1 − α)p + αq; α = 0 is reverse KL (DistiLLM, equation 5)."""
    return SkewReverseKL(alpha)


def total_variation() -> Divergence:
    """½ Σ|p − q|, between 0 and 1."""
    return TotalVariation()


def alpha_beta(alpha: float, beta: float) -> Divergence:
    """The alpha-beta divergence; (1, 0) is forward KL, (0, 1) reverse KL (ABKD, equation 3).

    It is an f-divergence only for α + β = 1: otherwise merging outcomes may increase it. A negative exponent raises
    ValueError, since one probability of zero would make the divergence infinite. An exception is α + β = 0 (including
    α = β = 0), which is computed as the limit and is finite if all logits are finite and (p/q)^α does not overflow.
    Arguments close to a limiting case (α = 0, β = 0 or α + β = 0) lose digits: use the limit itself.
    """
    return alpha_beta_class(alpha, beta)(alpha, beta)


def parse_divergence(text: str) -> Divergence:
    """Return the divergence of an expression, for example '0.9*forward_kl + 0.1*jsd(0.5, normalized=True)'.

    Raises ValueError for an unknown name (the message has the nearest known one), wrong arguments, or a weight ≤ 0.
    """
    summands = parse_sum(text)
    for summand in summands:
        if summand.name not in DIVERGENCES:
            raise unknown_name(summand.name, DIVERGENCES)
    return weighted_sum(summands)


def weighted_sum(summands: Sequence[Summand]) -> Divergence:
    """Return the sum of one or more named divergences with their coefficients."""
    return reduce(
        operator.add, (summand.coefficient * summand.call(DIVERGENCES[summand.name]) for summand in summands)
    )


DIVERGENCES: dict[str, Callable[..., Divergence]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "total_variation": total_variation,
    "alpha_beta": alpha_beta,
}
