"""The divergences as their papers define them, written out with plain probabilities."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, Sides
from stillhouse.objective.numerics import difference, interpolation

Formula = Callable[[Tensor, Tensor], Tensor]


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * torch.log(p / q)).sum()


def jsd_formula(beta: float) -> Formula:
    return lambda p, q: beta * kl(p, beta * p + (1 - beta) * q) + (1 - beta) * kl(q, beta * p + (1 - beta) * q)


def alpha_beta_formula(a: float, b: float) -> Formula:
    """Cichocki, Cruces and Amari 2011, equation 20 and its limits (21)."""
    if a == 0 and b == 0:
        return lambda p, q: 0.5 * (p.log() - q.log()).square().sum()
    if a + b == 0:
        return lambda p, q: ((q**a / p**a).log() + (q**a / p**a) ** -1 - 1).sum() / a**2
    if a == 0:
        return lambda p, q: (q**b * (q**b / p**b).log() - q**b + p**b).sum() / b**2
    if b == 0:
        return lambda p, q: (p**a * (p**a / q**a).log() - p**a + q**a).sum() / a**2
    return lambda p, q: -(p**a * q**b - a / (a + b) * p ** (a + b) - b / (a + b) * q ** (a + b)).sum() / (a * b)


TEXTBOOK: dict[str, Formula] = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd(0.3)": jsd_formula(0.3),
    "jsd(0.9)": jsd_formula(0.9),
    "jsd(0.5, normalized=True)": lambda p, q: jsd_formula(0.5)(p, q) / 0.25,
    "jsd(0.9, normalized=True)": lambda p, q: jsd_formula(0.9)(p, q) / 0.09,
    "skew_forward_kl(0)": kl,
    "skew_forward_kl(0.1)": lambda p, q: kl(p, 0.1 * p + 0.9 * q),
    "skew_reverse_kl(0)": lambda p, q: kl(q, p),
    "skew_reverse_kl(0.1)": lambda p, q: kl(q, 0.9 * p + 0.1 * q),
    "total_variation": lambda p, q: 0.5 * (p - q).abs().sum(),
    "0.9*forward_kl + 0.1*reverse_kl": lambda p, q: 0.9 * kl(p, q) + 0.1 * kl(q, p),
    "2*jsd(0.3) + total_variation": lambda p, q: 2 * jsd_formula(0.3)(p, q) + 0.5 * (p - q).abs().sum(),
    **{
        f"alpha_beta({a}, {b})": alpha_beta_formula(a, b)
        for a, b in [(0.2, 0.5), (2, 1), (0.4, 0.6), (1, 0), (0, 1), (0.7, 0), (0, 0.7), (0.5, -0.5), (-1, 1), (0, 0)]
    },
}


@dataclass(frozen=True)
class Triangular(Divergence):
    """Σ (p − q)² / m with m = αp + (1 − α)q, a user's class: `kit.divergence_formulas:Triangular`."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        assert 0 < self.alpha < 1, "alpha between 0 and 1"

    def balanced(self, pair: Sides) -> Tensor:
        gap, m = self.gap(pair)
        return gap * (gap / m)

    def balanced_slope(self, pair: Sides) -> Tensor:
        gap, m = self.gap(pair)
        return (pair.q / m) * gap * (2 - (1 - self.alpha) * (gap / m))

    def gap(self, pair: Sides) -> tuple[Tensor, Tensor]:
        return difference(pair.p, pair.q, pair.ratio), interpolation(pair.p, pair.q, self.alpha)


TRIANGULAR = "kit.divergence_formulas:Triangular"
