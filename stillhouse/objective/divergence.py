"""Divergences between a teacher p and a student q, each a pair of pointwise functions.

    D(p, q)  = Σ_v f(log p_v, log q_v)                 `value`
    h_v      = ∂D/∂q_v with q_v taken as free           `weighted_slope` is q_v·h_v
    ∂D/∂z_v  = q_v (h_v − Σ_u q_u h_u) / τ              what the engine makes of it

The slope is kept multiplied by q: −p/q overflows where q underflows, q·(−p/q) = −p does not. Over a whole
distribution a constant in h cancels; it is kept all the same, since a sum truncated to the teacher's top-k
(tail "drop") feels it.

Everything stays in log space. A probability of zero is a log-probability of −inf: 0·log 0 is 0 here, never NaN,
and a divergence that is truly infinite (forward KL where the teacher has mass and the student has none) is inf.
All functions are also differentiable by autograd, which is how `reference.py` checks the slopes.

Sources: Jensen–Shannon with a weight: GKD (arXiv 2306.13649); skewed KL: DistiLLM (arXiv 2402.03898);
alpha-beta: ABKD (arXiv 2505.04560) after Cichocki, Cruces and Amari, Entropy 2011, 13, 134.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.objective.expression import parse_sum, unknown_name


class Divergence(ABC):
    """D(p, q) as two pointwise functions; sums and multiples of divergences are divergences."""

    @abstractmethod
    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """f(log p, log q), elementwise, in nats; its sum over the vocabulary is D."""

    @abstractmethod
    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """q·∂f/∂q, elementwise."""

    @abstractmethod
    def __str__(self) -> str:
        """The expression that `parse_divergence` reads back."""

    def __add__(self, other: "Divergence") -> "Divergence":
        return WeightedSum(weighted_parts(self) + weighted_parts(other))

    def __mul__(self, coefficient: float) -> "Divergence":
        if isinstance(coefficient, bool):  # it would count as 1, and is more likely an argument in the wrong place
            raise ValueError(f"{coefficient}*({self}): expected a positive number")
        parts = tuple((coefficient * weight, part) for weight, part in weighted_parts(self))
        return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else WeightedSum(parts)

    __rmul__ = __mul__


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


@dataclass(frozen=True)
class WeightedSum(Divergence):
    """Σ c_i D_i with every c_i > 0: values and slopes add."""

    parts: tuple[tuple[float, Divergence], ...]

    def __post_init__(self) -> None:
        for weight, part in self.parts:
            if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"weight {weight} of {part}: expected a positive number")

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        first, *rest = (weight * part.value(log_p, log_q) for weight, part in self.parts)
        return sum(rest, start=first)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        first, *rest = (weight * part.weighted_slope(log_p, log_q) for weight, part in self.parts)
        return sum(rest, start=first)

    def __str__(self) -> str:
        return " + ".join(str(part) if weight == 1 else f"{_exact(weight)}*{part}" for weight, part in self.parts)


@dataclass(frozen=True)
class ForwardKL(Divergence):
    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _expect(log_p.exp(), _log_ratio(log_p, log_q))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -log_p.exp()

    def __str__(self) -> str:
        return "forward_kl"


@dataclass(frozen=True)
class ReverseKL(Divergence):
    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return _expect(log_q.exp(), _log_ratio(log_q, log_p))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self.value(log_p, log_q) + log_q.exp()

    def __str__(self) -> str:
        return "reverse_kl"


@dataclass(frozen=True)
class JensenShannon(Divergence):
    beta: float
    normalized: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"jsd(beta={self.beta}): expected 0 < beta < 1, since it is zero everywhere at both ends; "
                "use forward_kl or reverse_kl there, or normalized=True close to them"
            )
        if self.normalized not in (True, False):
            raise ValueError(f"jsd(normalized={self.normalized}): expected True or False")

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_mq, log_mp = _log_mixture_over_q_and_p(log_p, log_q, self.beta)
        of_p, of_q = self._weights()
        return -of_p * _expect(log_p.exp(), log_mp) - of_q * _expect(log_q.exp(), log_mq)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_mq, _ = _log_mixture_over_q_and_p(log_p, log_q, self.beta)
        return -self._weights()[1] * _expect(log_q.exp(), log_mq)

    def _weights(self) -> tuple[float, float]:
        if self.normalized:
            return 1 / (1 - self.beta), 1 / self.beta
        return self.beta, 1 - self.beta

    def __str__(self) -> str:
        return f"jsd({_exact(self.beta)}, normalized=True)" if self.normalized else f"jsd({_exact(self.beta)})"


@dataclass(frozen=True)
class SkewForwardKL(Divergence):
    alpha: float

    def __post_init__(self) -> None:
        _check_skew("skew_forward_kl", self.alpha)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        _, log_mp = _log_mixture_over_q_and_p(log_p, log_q, self.alpha)
        return -_expect(log_p.exp(), log_mp)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        # q·p/m as p·(q/m): q/m ≤ 1/(1 − α), while p/m times q would be 0·inf where q underflows at α = 0
        log_mq, _ = _log_mixture_over_q_and_p(log_p, log_q, self.alpha)
        return -(1 - self.alpha) * log_p.exp() * (-log_mq).exp()

    def __str__(self) -> str:
        return f"skew_forward_kl({_exact(self.alpha)})"


@dataclass(frozen=True)
class SkewReverseKL(Divergence):
    alpha: float

    def __post_init__(self) -> None:
        _check_skew("skew_reverse_kl", self.alpha)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_mq, _ = _log_mixture_over_q_and_p(log_p, log_q, 1 - self.alpha)
        return -_expect(log_q.exp(), log_mq)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        log_mq, _ = _log_mixture_over_q_and_p(log_p, log_q, 1 - self.alpha)
        q = log_q.exp()
        slope = q - _expect(q, log_mq)
        return slope if self.alpha == 0 else slope - self.alpha * q * (-log_mq).exp()

    def __str__(self) -> str:
        return f"skew_reverse_kl({_exact(self.alpha)})"


@dataclass(frozen=True)
class TotalVariation(Divergence):
    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return 0.5 * (log_p.exp() - log_q.exp()).abs()

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        p, q = log_p.exp(), log_q.exp()
        return 0.5 * q * torch.sign(q - p)

    def __str__(self) -> str:
        return "total_variation"


@dataclass(frozen=True)
class AlphaBeta(Divergence):
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        exponents_are_safe = self.alpha >= 0 and self.beta >= 0
        if not (math.isfinite(self.alpha) and math.isfinite(self.beta)):
            raise ValueError(f"{self}: expected finite numbers")
        if not exponents_are_safe and self.alpha + self.beta != 0:
            raise ValueError(
                f"{self}: a negative exponent is infinite at a probability of zero; "
                "expected alpha ≥ 0 and beta ≥ 0, or alpha + beta = 0"
            )

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        ratio = _log_ratio(log_p, log_q)
        if alpha == 0 and beta == 0:
            return 0.5 * ratio.square()
        if total == 0:
            return (torch.expm1(alpha * ratio) - alpha * ratio) / alpha**2
        if alpha == 0:
            return (beta * _expect(_power(log_q, beta), -ratio) - _power(log_q, beta) + _power(log_p, beta)) / beta**2
        if beta == 0:
            return (
                alpha * _expect(_power(log_p, alpha), ratio) - _power(log_p, alpha) + _power(log_q, alpha)
            ) / alpha**2
        ends = alpha / total * _power(log_p, total) + beta / total * _power(log_q, total)
        return (ends - torch.exp(alpha * log_p + beta * log_q)) / (alpha * beta)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        ratio = _log_ratio(log_p, log_q)
        if alpha == 0:
            return -_expect(_power(log_q, beta), ratio) if beta else -ratio
        if total == 0:
            return -torch.expm1(alpha * ratio) / alpha
        cross = _power(log_p, alpha) if beta == 0 else torch.exp(alpha * log_p + beta * log_q)
        return (_power(log_q, total) - cross) / alpha

    def __str__(self) -> str:
        return f"alpha_beta({_exact(self.alpha)}, {_exact(self.beta)})"


def weighted_parts(divergence: Divergence) -> tuple[tuple[float, Divergence], ...]:
    """The summands of a divergence with their weights; of a plain one, itself."""
    return divergence.parts if isinstance(divergence, WeightedSum) else ((1.0, divergence),)


def _exact(number: float) -> str:
    """The shortest text that reads back as the same number; 1.0 is 1."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _check_skew(name: str, alpha: float) -> None:
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"{name}(alpha={alpha}): expected 0 ≤ alpha < 1; it is zero everywhere at alpha = 1")


def _expect(probability: Tensor, quantity: Tensor) -> Tensor:
    """probability·quantity with 0·inf = 0, in value and in autograd."""
    return probability * quantity.masked_fill(probability == 0, 0.0)


def _power(log_probability: Tensor, exponent: float) -> Tensor:
    return torch.exp(exponent * log_probability)


def _log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a/b), with 0/0 taken as 1 (neither side has mass there, so that nothing depends on it)."""
    return (log_a - log_b).masked_fill((log_a == -math.inf) & (log_b == -math.inf), 0.0)


def _log_mixture_over_q_and_p(log_p: Tensor, log_q: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """log(m/q) and log(m/p) for m = weight·p + (1 − weight)·q, right to the last digit for a weight near 0 or 1."""
    ratio = _log_ratio(log_p, log_q)
    return _log_one_plus(weight, ratio), _log_one_plus(1 - weight, -ratio)


def _log_one_plus(weight: float, ratio: Tensor) -> Tensor:
    """log(1 + weight·(e^ratio − 1)), to full relative precision for every weight in [0, 1] and every ratio.

    Three forms, since each loses its digits where another is exact: log1p near 0, where the result is small; the
    plain logarithm where weight·e^ratio is what is left beside 1 − weight; and the ratio taken out where e^ratio
    would overflow. Arguments are clamped to the form's own range so that autograd sees no infinity in the others.
    """
    if weight == 0:
        return torch.zeros_like(ratio)
    if weight == 1:
        return ratio
    low, high = (-0.5 if weight > 0.5 else -math.inf), 30.0
    result = torch.log1p(weight * torch.expm1(ratio.clamp(low, high)))
    above = ratio.clamp(min=high)
    result = torch.where(ratio > high, above + torch.log(weight + (1 - weight) * torch.exp(-above)), result)
    if low == -math.inf:
        return result
    return torch.where(ratio < low, torch.log((1 - weight) + weight * torch.exp(ratio.clamp(max=low))), result)
