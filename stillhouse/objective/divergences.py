"""The divergences, one class each, and the table of their names.

`divergence.py` defines p, q, f, h and the constant c. The docstrings of this file also use f* = f + c (q − p),
E(a, b) = a log(a/b) + b − a, and r = log(q/p).

Sources: Jensen–Shannon with a weight: GKD (arXiv 2306.13649); skewed KL: DistiLLM (arXiv 2402.03898).
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from stillhouse.objective.custom_divergences import check_divergence, divergence_class, imported_class
from stillhouse.objective.divergence import Divergence, KullbackLeibler, Sides, sides
from stillhouse.objective.divergence_parameters import (
    PARAMETERS,
    AlphaBetaParameters,
    DivergenceKinds,
    ForwardKLParameters,
    JensenShannonParameters,
    ReverseKLParameters,
    SkewForwardKLParameters,
    SkewReverseKLParameters,
    TotalVariationParameters,
)
from stillhouse.objective.expression import Summand, parse_sum, unknown_name
from stillhouse.objective.numerics import (
    NEAR,
    difference,
    excess,
    expect,
    interpolation,
    interpolation_logs,
    log_ratio,
    polynomial,
    terms,
)


@dataclass(frozen=True)
class ForwardKL(ForwardKLParameters, KullbackLeibler):
    """KL(p‖q): the student must give mass to every token that has mass under the teacher. c = 1, f* = E(p, q)."""

    student_first = False

    def balanced_slope(self, pair: Sides) -> Tensor:
        return difference(pair.p, pair.q, pair.ratio)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -log_p.exp()


@dataclass(frozen=True)
class ReverseKL(ReverseKLParameters, KullbackLeibler):
    """KL(q‖p): the student must give no mass to tokens without mass under the teacher. c = −1, f* = E(q, p)."""

    student_first = True

    def balanced_slope(self, pair: Sides) -> Tensor:
        return expect(pair.q, pair.ratio)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self.value(log_p, log_q) + log_q.exp()


@dataclass(frozen=True)
class JensenShannon(JensenShannonParameters, Divergence):
    """β·KL(p‖m) + (1 − β)·KL(q‖m) with m = βp + (1 − β)q. c = 0, f* = β E(p, m) + (1 − β) E(q, m).

    The divergence tends to 0 for β → 0 and for β → 1. With `normalized=True` it is divided by β(1 − β), and then
    tends to forward KL for β → 0 and to reverse KL for β → 1.
    """

    def balanced(self, pair: Sides) -> Tensor:
        weight_p, weight_q = self.weights()
        m = interpolation(pair.p, pair.q, self.beta)
        m_to_p, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.beta)
        return weight_p * excess(pair.p, m, m_to_p) + weight_q * excess(pair.q, m, m_to_q)

    def balanced_slope(self, pair: Sides) -> Tensor:
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.beta)
        return -self.weights()[1] * expect(pair.q, m_to_q)

    def weights(self) -> tuple[float, float]:
        """Return the factors of E(p, m) and E(q, m)."""
        if self.normalized:
            return 1 / (1 - self.beta), 1 / self.beta
        return self.beta, 1 - self.beta


class SkewForwardKL(SkewForwardKLParameters, Divergence):
    """KL(p‖m) with m = αp + (1 − α)q; α = 0 is forward KL (DistiLLM, equation 4). c = 1 − α, f* = E(p, m)."""

    def balanced(self, pair: Sides) -> Tensor:
        m_to_p, _ = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.alpha)
        return excess(pair.p, interpolation(pair.p, pair.q, self.alpha), m_to_p)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """Return (1 − α) q (m − p) / m, where m − p = (1 − α)(q − p)."""
        gap = difference(pair.p, pair.q, pair.ratio)
        if self.alpha == 0:  # this form is exact even where q underflows
            return gap
        return (1 - self.alpha) ** 2 * (pair.q / interpolation(pair.p, pair.q, self.alpha)) * gap

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        m_to_p, _ = interpolation_logs(log_p, log_q, log_ratio(log_q, log_p), self.alpha)
        return -expect(log_p.exp(), m_to_p)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        if self.alpha == 0:
            return -log_p.exp()
        p, q = log_p.exp(), log_q.exp()
        return (self.alpha - 1) * p * (q / interpolation(p, q, self.alpha))


class SkewReverseKL(SkewReverseKLParameters, Divergence):
    """KL(q‖m) with m = (1 − α)p + αq; α = 0 is reverse KL (DistiLLM, equation 5). c = α − 1, f* = E(q, m)."""

    def balanced(self, pair: Sides) -> Tensor:
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, 1 - self.alpha)
        return excess(pair.q, interpolation(pair.p, pair.q, 1 - self.alpha), m_to_q)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """Return q (t − α (e^t − 1)) = q ((1 − α) t − α (e^t − 1 − t)) for t = log(q/m)."""
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, 1 - self.alpha)
        slope = (self.alpha - 1) * expect(pair.q, m_to_q)
        if self.alpha == 0:
            return slope
        ratio_m = pair.q * (pair.q / interpolation(pair.p, pair.q, 1 - self.alpha))
        return slope - self.alpha * excess(pair.q, ratio_m, -m_to_q)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        _, m_to_q = interpolation_logs(log_p, log_q, log_ratio(log_q, log_p), 1 - self.alpha)
        return -expect(log_q.exp(), m_to_q)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self.balanced_slope(sides(log_p, log_q)) + (1 - self.alpha) * log_q.exp()


@dataclass(frozen=True)
class TotalVariation(TotalVariationParameters, Divergence):
    """½ Σ|p − q|, between 0 and 1. c = 0. The pivot's h (`Sides`) is subtracted from every h."""

    def balanced(self, pair: Sides) -> Tensor:
        return 0.5 * difference(pair.p, pair.q, pair.ratio).abs()

    def balanced_slope(self, pair: Sides) -> Tensor:
        """Return ½ q (sign(q − p) − the sign at the pivot). At a pivot with q ≈ 1, this is 0 and not about ±½."""
        sign = torch.sign(pair.ratio)
        return 0.5 * expect(pair.q, sign if pair.pivot is None else sign - torch.sign(pair.pivot.ratio))


@dataclass(frozen=True)
class AlphaBeta(AlphaBetaParameters, Divergence):
    """The alpha-beta divergence. c = 0. (ABKD, arXiv 2505.04560; Cichocki, Cruces and Amari, Entropy 2011, 13, 134)

        α, β, α + β ≠ 0    Σ (α/(α+β) p^(α+β) + β/(α+β) q^(α+β) − p^α q^β) / (αβ)
        α = 0              Σ (p^β − q^β − β q^β log(p/q)) / β²
        β = 0              Σ (q^α − p^α − α p^α log(q/p)) / α²
        α + β = 0          Σ ((p/q)^α − 1 − α log(p/q)) / α²
        α = β = 0          ½ Σ log²(q/p)

    (α, β) = (1, 0) is forward KL, (0, 1) is reverse KL (ABKD, eq. 3). The divergence is an f-divergence only for
    α + β = 1. For other α + β, merging outcomes can increase the divergence. Negative exponents raise ValueError,
    because one probability of zero would make the divergence infinite. The only exception is α + β = 0, where the
    divergence is finite if all logits are finite and (p/q)^α does not overflow. Close to a limiting case (α = 0,
    β = 0 or α + β = 0), the result loses digits. Use the limiting case itself instead.
    """

    def balanced(self, pair: Sides) -> Tensor:
        """Return f*.

        In the general case, f* = p^(α+β) (β (e^((α+β)r) − 1 − (α+β)r) − (α+β) (e^(βr) − 1 − βr)) / (αβ(α+β)). Where p
        and q are close, f* is computed as a power series in r that begins with r². The terms of this series cancel
        least if p^(α+β) is factored out for α ≥ β, and q^(α+β) for α < β.
        """
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        if alpha == beta == 0:
            return 0.5 * self._ratio(pair).square()
        if total == 0:
            # clamp log(p/q) = inf to the largest finite number: e^t − 1 − t is then inf and not inf − inf = NaN
            t = (-alpha * self._ratio(pair)).clamp(max=torch.finfo(pair.ratio.dtype).max)
            return excess(torch.ones_like(t), t.exp(), t) / alpha**2
        is_one = total == 1 and alpha and beta
        power_p, power_q = (pair.p, pair.q) if is_one else (_power(pair.log_p, total), _power(pair.log_q, total))
        if alpha == 0:
            return excess(power_q, power_p, -beta * pair.ratio) / beta**2
        if beta == 0:
            return excess(power_p, power_q, alpha * pair.ratio) / alpha**2
        far = alpha / total * power_p + beta / total * power_q - torch.exp(alpha * pair.log_p + beta * pair.log_q)
        near = (total * pair.ratio).abs() < NEAR
        small = pair.ratio.clamp(-NEAR / total, NEAR / total)
        outer, t, inner = (power_p, small, beta) if alpha >= beta else (power_q, -small, alpha)
        series = [inner * (total ** (n - 1) - inner ** (n - 1)) / math.factorial(n) for n in range(2, terms(t) + 1)]
        close = outer * t * t * polynomial(series, t)
        return torch.where(near, close, far) / (alpha * beta)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """Return q·h with h = q^(α+β−1) (1 − (p/q)^α) / α or, for α + β > 1, q·(h − the pivot's h).

        Without this subtraction, the slope of an outcome with a probability near 1 would outweigh all other slopes.
        """
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        if total == 0:
            ratio = self._ratio(pair)
            return -torch.expm1(-alpha * ratio) / alpha if alpha else ratio
        if alpha == 0:
            slope = expect(_power(pair.log_q, beta), pair.ratio)
        else:
            # for β = 0, the product β·log q is omitted, because it is NaN for q = 0
            log_product = alpha * pair.log_p + beta * pair.log_q if beta else alpha * pair.log_p
            power_q = pair.q if total == 1 else _power(pair.log_q, total)
            slope = difference(log_product.exp(), power_q, alpha * pair.ratio) / alpha
        if total <= 1 or pair.pivot is None:
            return slope
        factor = -torch.expm1(-alpha * pair.pivot.ratio) / alpha if alpha else pair.pivot.ratio
        is_pivot = (pair.log_q == pair.pivot.log_q) & (pair.ratio == pair.pivot.ratio)
        return torch.where(is_pivot, 0.0, slope - pair.q * (_power(pair.pivot.log_q, total - 1) * factor))

    def _ratio(self, pair: Sides) -> Tensor:
        """Return log(q/p), or 0 where p = q = 0."""
        return pair.ratio.masked_fill((pair.log_p == -math.inf) & (pair.log_q == -math.inf), 0.0)


def _power(log_probability: Tensor, exponent: float) -> Tensor:
    return torch.exp(exponent * log_probability)


#: the classes of divergences by their names in expressions; `divergence_parameters.py` has the classes of parameters
DIVERGENCES: dict[str, type[Divergence]] = {
    kind.definition.name: kind
    for kind in (
        ForwardKL,
        ReverseKL,
        JensenShannon,
        SkewForwardKL,
        SkewReverseKL,
        TotalVariation,
        AlphaBeta,
    )
}

forward_kl, reverse_kl, jsd, total_variation = ForwardKL, ReverseKL, JensenShannon, TotalVariation
skew_forward_kl, skew_reverse_kl, alpha_beta = SkewForwardKL, SkewReverseKL, AlphaBeta


def parse_divergence(text: str) -> Divergence:
    """Return the divergence of an expression, for example '0.9*forward_kl + 0.1*jsd(0.5, normalized=True)'.

    A class of yours has the name `package.module:Class`. It is imported and checked (`custom_divergences.py`).

    Raises ValueError for an unknown name (the message suggests a known name), wrong arguments, a weight ≤ 0, or a
    class that does not pass its check.
    """
    summands = parse_sum(text)
    for summand in summands:
        if summand.name not in DIVERGENCES and not summand.is_path:
            raise unknown_name(summand, PARAMETERS)
    return weighted_sum(summands, {})


def weighted_sum(summands: Sequence[Summand], kinds: DivergenceKinds) -> Divergence:
    """Return the weighted sum of the divergences that the summands name.

    kinds: the divergences of other packages by name. A path that is not among them is imported.

    Raises ValueError for a class that is not one of this package's and does not pass its check.
    """
    return reduce(operator.add, (summand.coefficient * _made(summand, kinds) for summand in summands))


def _made(summand: Summand, kinds: DivergenceKinds) -> Divergence:
    name = summand.name
    if name in DIVERGENCES:
        return summand.call(DIVERGENCES[name], DIVERGENCES[name].definition.example)
    kind = divergence_class(name, kinds[name] if name in kinds else imported_class(name))
    try:
        divergence = summand.call(kind, kind.definition.example)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"{name} raises {error!r}{summand.place}") from error
    check_divergence(divergence)
    return divergence
