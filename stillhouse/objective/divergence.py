"""The divergences by name, and the expression that names a sum of them.

The formulas and their sources are in `formulas.py`.
"""

from collections.abc import Callable

from stillhouse.objective.expression import parse_sum, unknown_name
from stillhouse.objective.formulas import (
    AlphaBeta,
    Divergence,
    ForwardKL,
    JensenShannon,
    ReverseKL,
    SkewForwardKL,
    SkewReverseKL,
    TotalVariation,
    WeightedSum,
    weighted_parts,
)

__all__ = [
    "DIVERGENCES",
    "Divergence",
    "WeightedSum",
    "alpha_beta",
    "forward_kl",
    "jsd",
    "parse_divergence",
    "reverse_kl",
    "skew_forward_kl",
    "skew_reverse_kl",
    "total_variation",
    "weighted_parts",
]


def forward_kl() -> Divergence:
    """KL(p‖q): the student covers everything that the teacher does. Zero where p = 0."""
    return ForwardKL()


def reverse_kl() -> Divergence:
    """KL(q‖p): the student avoids what the teacher avoids. Infinite where q > 0 and p = 0."""
    return ReverseKL()


def jsd(beta: float, normalized: bool = False) -> Divergence:
    """β·KL(p‖m) + (1 − β)·KL(q‖m) with m = βp + (1 − β)q, for β strictly between 0 and 1.

    It vanishes at both ends; `normalized=True` divides by β(1 − β), which tends to forward KL for β → 0 and to
    reverse KL for β → 1.
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

    An f-divergence only where α + β = 1: otherwise merging outcomes may raise it. A negative exponent is refused,
    since one probability of zero would make it infinite; α + β = 0 (α = β = 0 included) is coded as the limit, finite
    while all logits are and (p/q)^α does not overflow. A coefficient near one of its limits but not on it loses
    digits: write the limit.
    """
    return AlphaBeta(alpha, beta)


def parse_divergence(text: str) -> Divergence:
    """A divergence from its expression, e.g. '0.9*forward_kl + 0.1*jsd(0.5, normalized=True)'.

    Raises ValueError for an unknown name (with the nearest known one), wrong arguments, or a weight ≤ 0.
    """
    total: Divergence | None = None
    for part in parse_sum(text):
        if part.name not in DIVERGENCES:
            raise unknown_name(part.name, DIVERGENCES)
        divergence: Divergence = part.call(DIVERGENCES[part.name])
        if part.coefficient != 1.0:
            divergence = part.coefficient * divergence
        total = divergence if total is None else total + divergence
    assert total is not None  # an expression has at least one part
    return total


DIVERGENCES: dict[str, Callable[..., Divergence]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "total_variation": total_variation,
    "alpha_beta": alpha_beta,
}
