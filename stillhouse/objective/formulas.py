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

Where Σf and Σq·h over unnormalised probabilities can be put right afterwards (`Renormalizable`: all but those with a
mixture or an absolute value in them), they are summed in the same sweep over the logits as the normalisers, and over
vocabulary shards they travel in the same collective.

Sources: Jensen–Shannon with a weight: GKD (arXiv 2306.13649); skewed KL: DistiLLM (arXiv 2402.03898);
alpha-beta: ABKD (arXiv 2505.04560) after Cichocki, Cruces and Amari, Entropy 2011, 13, 134.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Moments = tuple[Tensor, ...]


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


class Renormalizable(Divergence):
    """A divergence whose sums over unnormalised probabilities turn into those over normalised ones.

    `moments` are a few elementwise quantities; of their sums over any part of the vocabulary, `renormalized` makes
    those for log_p + of_p and log_q + of_q (numbers of a row), and `from_moments` Σf and Σq·h.
    """

    #: how many moments there are
    size: ClassVar[int]

    @abstractmethod
    def moments(self, log_p: Tensor, log_q: Tensor) -> Moments: ...

    @abstractmethod
    def renormalized(self, moments: Moments, of_p: Tensor, of_q: Tensor) -> Moments: ...

    @abstractmethod
    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]: ...


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
class ForwardKL(Renormalizable):
    size = 2

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return expect(log_p.exp(), _log_ratio(log_p, log_q))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -log_p.exp()

    def moments(self, log_p: Tensor, log_q: Tensor) -> Moments:
        p = log_p.exp()
        return p, expect(p, _log_ratio(log_p, log_q))

    def renormalized(self, moments: Moments, of_p: Tensor, of_q: Tensor) -> Moments:
        return _renormalized_mean(moments, of_p.exp(), of_p - of_q)

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        mass, gap = moments
        return gap, -mass

    def __str__(self) -> str:
        return "forward_kl"


@dataclass(frozen=True)
class ReverseKL(Renormalizable):
    size = 2

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return expect(log_q.exp(), _log_ratio(log_q, log_p))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self.value(log_p, log_q) + log_q.exp()

    def moments(self, log_p: Tensor, log_q: Tensor) -> Moments:
        q = log_q.exp()
        return q, expect(q, _log_ratio(log_q, log_p))

    def renormalized(self, moments: Moments, of_p: Tensor, of_q: Tensor) -> Moments:
        return _renormalized_mean(moments, of_q.exp(), of_q - of_p)

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        mass, gap = moments
        return gap, gap + mass

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
        of_p, of_q = self._weights()
        p_term, q_term = _mixture_terms(log_p, log_q, self.beta)
        return -of_p * p_term - of_q * q_term

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -self._weights()[1] * _mixture_terms(log_p, log_q, self.beta)[1]

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
        return -_mixture_terms(log_p, log_q, self.alpha)[0]

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        if self.alpha == 0:  # also where q underflows
            return -log_p.exp()
        p, q = log_p.exp(), log_q.exp()
        return (self.alpha - 1) * p * (q / _mixture(p, q, self.alpha))

    def __str__(self) -> str:
        return f"skew_forward_kl({_exact(self.alpha)})"


@dataclass(frozen=True)
class SkewReverseKL(Divergence):
    alpha: float

    def __post_init__(self) -> None:
        _check_skew("skew_reverse_kl", self.alpha)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -_mixture_terms(log_p, log_q, 1 - self.alpha)[1]

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        q = log_q.exp()
        slope = q - _mixture_terms(log_p, log_q, 1 - self.alpha)[1]
        return slope if self.alpha == 0 else slope - self.alpha * q * (q / _mixture(log_p.exp(), q, 1 - self.alpha))

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
class AlphaBeta(Renormalizable):
    alpha: float
    beta: float

    size = 3

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
            return (beta * expect(_power(log_q, beta), -ratio) - _power(log_q, beta) + _power(log_p, beta)) / beta**2
        if beta == 0:
            return (
                alpha * expect(_power(log_p, alpha), ratio) - _power(log_p, alpha) + _power(log_q, alpha)
            ) / alpha**2
        ends = alpha / total * _power(log_p, total) + beta / total * _power(log_q, total)
        return (ends - torch.exp(alpha * log_p + beta * log_q)) / (alpha * beta)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        ratio = _log_ratio(log_p, log_q)
        if alpha == 0:
            return -expect(_power(log_q, beta), ratio) if beta else -ratio
        if total == 0:
            return -torch.expm1(alpha * ratio) / alpha
        cross = _power(log_p, alpha) if beta == 0 else torch.exp(alpha * log_p + beta * log_q)
        return (_power(log_q, total) - cross) / alpha

    def moments(self, log_p: Tensor, log_q: Tensor) -> Moments:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        ratio = _log_ratio(log_p, log_q)
        if alpha == 0 and beta == 0:
            return torch.ones_like(ratio), ratio, ratio.square()
        if total == 0:
            return torch.ones_like(ratio), ratio, torch.expm1(alpha * ratio)
        if alpha == 0:
            q = _power(log_q, beta)
            return q, expect(q, -ratio), _power(log_p, beta)
        if beta == 0:
            p = _power(log_p, alpha)
            return p, expect(p, ratio), _power(log_q, alpha)
        return torch.exp(alpha * log_p + beta * log_q), _power(log_p, total), _power(log_q, total)

    def renormalized(self, moments: Moments, of_p: Tensor, of_q: Tensor) -> Moments:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        first, second, third = moments
        gap = of_p - of_q
        if alpha == 0 and beta == 0:
            return first, second + gap * first, third + 2 * gap * second + gap.square() * first
        if total == 0:
            grown = torch.expm1(alpha * gap)
            return first, second + gap * first, third + grown * (third + first)
        if alpha == 0:
            return *_renormalized_mean((first, second), _power(of_q, beta), -gap), third * _power(of_p, beta)
        if beta == 0:
            return *_renormalized_mean((first, second), _power(of_p, alpha), gap), third * _power(of_q, alpha)
        cross = torch.exp(alpha * of_p + beta * of_q)
        return first * cross, second * _power(of_p, total), third * _power(of_q, total)

    def from_moments(self, moments: Moments) -> tuple[Tensor, Tensor]:
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        first, second, third = moments
        if alpha == 0 and beta == 0:
            return 0.5 * third, -second
        if total == 0:
            return (third - alpha * second) / alpha**2, -third / alpha
        if alpha == 0:
            return (beta * second - first + third) / beta**2, second
        if beta == 0:
            return (alpha * second - first + third) / alpha**2, (third - first) / alpha
        ends = alpha / total * second + beta / total * third
        return (ends - first) / (alpha * beta), (third - first) / alpha

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


def expect(probability: Tensor, quantity: Tensor) -> Tensor:
    """probability·quantity with 0·inf = 0, in value and in autograd."""
    return probability * quantity.masked_fill(probability == 0, 0.0)


def _power(log_probability: Tensor, exponent: float) -> Tensor:
    return torch.exp(exponent * log_probability)


def _log_ratio(log_a: Tensor, log_b: Tensor) -> Tensor:
    """log(a/b), with 0/0 taken as 1 (neither side has mass there, so that nothing depends on it)."""
    return (log_a - log_b).masked_fill((log_a == -math.inf) & (log_b == -math.inf), 0.0)


def _renormalized_mean(moments: Moments, factor: Tensor, gap: Tensor) -> Moments:
    """(Σw, Σw·x) for weights times `factor` and quantities plus `gap`."""
    mass, total = moments
    return factor * mass, expect(factor, total + gap * mass)


def _mixture_terms(log_p: Tensor, log_q: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """p·log(m/p) and q·log(m/q) for m = weight·p + (1 − weight)·q.

    Near the ends by the ratio p/q, since one of the logarithms is small there and has to be right to the last digit;
    in between by the mixture itself, whose logarithm rounds as log p and log q do.
    """
    p, q = log_p.exp(), log_q.exp()
    if 0.05 <= weight <= 0.95:
        log_m = torch.log(_mixture(p, q, weight))
        return expect(p, log_m - log_p), expect(q, log_m - log_q)
    ratio = _log_ratio(log_p, log_q)
    return expect(p, _log_one_plus(1 - weight, -ratio)), expect(q, _log_one_plus(weight, ratio))


def _mixture(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """weight·p + (1 − weight)·q, not quite 0 where both are: to be divided by."""
    return (weight * p + (1 - weight) * q).clamp(min=torch.finfo(p.dtype).tiny)


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
