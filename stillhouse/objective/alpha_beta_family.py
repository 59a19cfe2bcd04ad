"""The alpha-beta divergence: a class for the general case, and one for each limit.

    α, β, α + β ≠ 0    Σ (α/(α+β) p^(α+β) + β/(α+β) q^(α+β) − p^α q^β) / (αβ)
    α = 0              Σ (p^β − q^β − β q^β log(p/q)) / β²
    β = 0              Σ (q^α − p^α − α p^α log(q/p)) / α²
    α + β = 0          Σ ((p/q)^α − 1 − α log(p/q)) / α²
    α = β = 0          ½ Σ log²(q/p)

`AlphaBeta(α, β)` returns an object of the class for these exponents. As in `divergence.py`, p is the teacher's
probability, q the student's, r = log(q/p) and h = ∂D/∂q.

Sources: ABKD (arXiv 2505.04560) after Cichocki, Cruces and Amari, Entropy 2011, 13, 134.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.objective import numerics
from stillhouse.objective.divergence import Divergence, Sides
from stillhouse.objective.numerics import difference, excess, expect, polynomial, terms
from stillhouse.objective.parameters import AlphaBetaParameters


@dataclass(frozen=True)
class AlphaBeta(AlphaBetaParameters, Divergence):
    """The alpha-beta divergence; (1, 0) is forward KL, (0, 1) reverse KL (ABKD, equation 3). c = 0.

    It is an f-divergence only for α + β = 1; for other sums, merging outcomes may increase it. A negative exponent
    raises ValueError, because one probability of zero would make the divergence infinite. Only α + β = 0 allows a
    negative exponent: the divergence is then finite if all logits are finite and (p/q)^α does not overflow.
    Near a limiting case (α = 0, β = 0 or α + β = 0), the result loses digits: use the limit itself.
    """

    def __new__(cls, alpha: float, beta: float) -> "AlphaBeta":
        if alpha + beta == 0:
            return super().__new__(SumZero if alpha else BothZero)
        if alpha == 0:
            return super().__new__(AlphaZero)
        return super().__new__(AlphaBeta if beta else BetaZero)

    def __getnewargs__(self) -> tuple[float, float]:
        return self.alpha, self.beta  # used by copy and pickle

    def balanced(self, pair: Sides) -> Tensor:
        """p^(α+β) (β (e^((α+β)r) − 1 − (α+β)r) − (α+β) (e^(βr) − 1 − βr)) / (αβ(α+β)).

        Where p and q are close, this is computed as a power series in r that begins with r². The terms cancel least
        if p^(α+β) is factored out for α ≥ β, and q^(α+β) otherwise.
        """
        alpha, beta, total = self.alpha, self.beta, self.alpha + self.beta
        power_p, power_q = (pair.p, pair.q) if total == 1 else (_power(pair.log_p, total), _power(pair.log_q, total))
        far = alpha / total * power_p + beta / total * power_q - torch.exp(alpha * pair.log_p + beta * pair.log_q)
        near = (total * pair.ratio).abs() < numerics.NEAR
        small = pair.ratio.clamp(-numerics.NEAR / total, numerics.NEAR / total)
        outer, t, inner = (power_p, small, beta) if alpha >= beta else (power_q, -small, alpha)
        series = [inner * (total ** (n - 1) - inner ** (n - 1)) / math.factorial(n) for n in range(2, terms(t) + 1)]
        close = outer * t * t * polynomial(series, t)
        return torch.where(near, close, far) / (alpha * beta)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """q·h; for α + β > 1, q·(h − the pivot's h).

        Without this subtraction, the slope of an outcome with a probability near 1 would outweigh all other slopes.
        """
        total = self.alpha + self.beta
        if total <= 1 or pair.pivot is None:
            return self._slope(pair)
        constant = _power(pair.pivot.log_q, total - 1) * self._slope_factor(pair.pivot.ratio)
        return torch.where(pair.is_pivot(), 0.0, self._slope(pair) - pair.q * constant)

    def _slope(self, pair: Sides) -> Tensor:
        """q·h = (q^(α+β) − p^α q^β) / α."""
        total = self.alpha + self.beta
        power_q = pair.q if total == 1 else _power(pair.log_q, total)
        return difference(self._product(pair), power_q, self.alpha * pair.ratio) / self.alpha

    def _product(self, pair: Sides) -> Tensor:
        """p^α q^β."""
        return torch.exp(self.alpha * pair.log_p + self.beta * pair.log_q)

    def _slope_factor(self, ratio: Tensor) -> Tensor:
        """h / q^(α+β−1) = (1 − (p/q)^α) / α."""
        return -torch.expm1(-self.alpha * ratio) / self.alpha


class AlphaZero(AlphaBeta):
    """The limit α = 0; β = 1 is reverse KL."""

    def balanced(self, pair: Sides) -> Tensor:
        power_p, power_q = _power(pair.log_p, self.beta), _power(pair.log_q, self.beta)
        return excess(power_q, power_p, -self.beta * pair.ratio) / self.beta**2

    def _slope(self, pair: Sides) -> Tensor:
        return expect(_power(pair.log_q, self.beta), pair.ratio)

    def _slope_factor(self, ratio: Tensor) -> Tensor:
        return ratio


class BetaZero(AlphaBeta):
    """The limit β = 0; α = 1 is forward KL."""

    def balanced(self, pair: Sides) -> Tensor:
        power_p, power_q = _power(pair.log_p, self.alpha), _power(pair.log_q, self.alpha)
        return excess(power_p, power_q, self.alpha * pair.ratio) / self.alpha**2

    def _product(self, pair: Sides) -> Tensor:
        return _power(pair.log_p, self.alpha)  # in the general form, 0·log q is NaN for q = 0


class SumZero(AlphaBeta):
    """The limit α + β = 0, which depends only on the ratio of the two probabilities."""

    def balanced(self, pair: Sides) -> Tensor:
        # clamp log(p/q) = inf to the largest finite number: e^t − 1 − t is then inf and not inf − inf = NaN
        t = (-self.alpha * _ratio(pair)).clamp(max=torch.finfo(pair.ratio.dtype).max)
        return excess(torch.ones_like(t), t.exp(), t) / self.alpha**2

    def _slope(self, pair: Sides) -> Tensor:
        return self._slope_factor(_ratio(pair))


class BothZero(AlphaBeta):
    """The limit α = β = 0."""

    def balanced(self, pair: Sides) -> Tensor:
        return 0.5 * _ratio(pair).square()

    def _slope(self, pair: Sides) -> Tensor:
        return _ratio(pair)


def _ratio(pair: Sides) -> Tensor:
    """log(q/p); 0 where p = q = 0."""
    return pair.ratio.masked_fill((pair.log_p == -math.inf) & (pair.log_q == -math.inf), 0.0)


def _power(log_probability: Tensor, exponent: float) -> Tensor:
    return torch.exp(exponent * log_probability)
