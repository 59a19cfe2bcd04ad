"""Divergences between the probabilities p of a teacher and q of a student, each as two pointwise functions.

    D(p, q)  = Σ_v f(log p_v, log q_v)                  summed over the vocabulary, or over other outcomes v
    h_v      = ∂D/∂q_v                                  as if the q_v were independent of each other
    ∂D/∂z_v  = q_v (h_v − Σ_u q_u h_u) / τ              the gradient by the logits z at temperature τ

The functions return q·h instead of h: −p/q overflows where q underflows, but q·(−p/q) = −p does not.

Over whole distributions Σ(q − p) is 0. So c (q − p) can be added to f, and c to h, for any constant c, without a
change of D or its gradient. The table gives the c with which f is never negative and f and h are 0 where p = q. Then
a small divergence is a sum of small numbers, and it keeps its digits where student and teacher are close and both
have one token with a probability near 1 (see `stable.py`). The pass sums these "balanced" functions:

    balanced        f + c (q − p)
    balanced_slope  q (h + c)

`value` and `weighted_slope` are f and q·h as in textbooks, with c = 0. They are for sums over only a part of the
outcomes (a top-k with the tail "drop"), which depend on c.

| divergence | c | f + c (q − p), with E(a, b) = a log(a/b) + b − a |
| --- | --- | --- |
| forward KL | 1 | E(p, q) |
| reverse KL | −1 | E(q, p) |
| jsd(β), m = βp + (1−β)q | 0 | β E(p, m) + (1−β) E(q, m) |
| skew forward KL(α), m = αp + (1−α)q | 1−α | E(p, m) |
| skew reverse KL(α), m = (1−α)p + αq | α−1 | E(q, m) |
| total variation | 0 | ½ abs(q − p) |
| alpha-beta | 0 | (β E'(α+β) − (α+β) E'(β)) / (αβ(α+β)), E'(x) = p^(α+β) (e^(xr) − 1 − xr), r = log(q/p) |

All inputs are log-probabilities. A probability of zero is a log-probability of −inf: 0·log 0 is 0 here, never NaN,
and a divergence that is truly infinite (forward KL where the teacher has mass and the student has none) is inf.
Autograd can differentiate all functions; `reference.py` uses that, and the tests compare the slopes with it.

Alpha-beta is in `alpha_beta.py`.

Sources: Jensen–Shannon with a weight: GKD (arXiv 2306.13649); skewed KL: DistiLLM (arXiv 2402.03898).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective.stable import (
    difference,
    excess,
    expect,
    interpolation,
    interpolation_logs,
    log_ratio,
)


class Pivot(NamedTuple):
    """log q and log(q/p) of a row's argmax outcome, [rows, 1]."""

    log_q: Tensor
    ratio: Tensor


class Sides(NamedTuple):
    """Teacher and student at some outcomes, elementwise.

    ratio: log(q/p), with more correct digits than the difference log_q − log_p may have. It may be NaN where neither
        side has mass: use it only in products with a probability (`expect`).
    pivot: for divergences whose slope h is not small where p and q are close and near 1. They subtract the pivot's h
        from every h. Over whole distributions this does not change the gradient, whichever outcome the pivot is.
    """

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor
    ratio: Tensor
    pivot: Pivot | None

    def is_pivot(self) -> Tensor:
        assert self.pivot is not None
        return (self.log_q == self.pivot.log_q) & (self.ratio == self.pivot.ratio)


def sides(log_p: Tensor, log_q: Tensor, ratio: Tensor | None = None, pivot: Pivot | None = None) -> Sides:
    """Return the `Sides` of two log-probabilities. ratio: log(q/p); None: computed as log q − log p."""
    ratio = log_ratio(log_q, log_p) if ratio is None else ratio
    return Sides(log_p, log_q, log_p.exp(), log_q.exp(), ratio, pivot)


class Divergence(ABC):
    """D(p, q) as two pointwise functions. Sums and positive multiples of divergences are divergences."""

    @abstractmethod
    def balanced(self, pair: Sides) -> Tensor:
        """f + c·(q − p), elementwise, in nats, never negative; its sum over a whole distribution is D."""

    @abstractmethod
    def balanced_slope(self, pair: Sides) -> Tensor:
        """q·(∂f/∂q + c), elementwise; c is a number per row such that the result is 0 or small where p = q."""

    @abstractmethod
    def __str__(self) -> str:
        """The expression from which `parse_divergence` makes this divergence."""

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """f(log p, log q), elementwise, in nats."""
        return self.balanced(sides(log_p, log_q))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """q·∂f/∂q, elementwise."""
        return self.balanced_slope(sides(log_p, log_q))

    def __add__(self, other: "Divergence") -> "Divergence":
        return WeightedSum(weighted_parts(self) + weighted_parts(other))

    def __mul__(self, coefficient: float) -> "Divergence":
        if isinstance(coefficient, bool):  # would count as 1, but is probably an argument in the wrong place
            raise ValueError(f"{coefficient}*({self}): expected a positive number")
        parts = tuple((coefficient * weight, part) for weight, part in weighted_parts(self))
        return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else WeightedSum(parts)

    __rmul__ = __mul__


class KullbackLeibler(Divergence):
    """KL(a‖b), where a and b are teacher and student, or student and teacher.

    Its sums over unnormalized probabilities can be normalized afterwards (`statistics.py`). So they are computed in
    the same sweep over the logits as the normalizers, and vocabulary shards gather both in the same collective.
    """

    #: whether a is the student
    student_first: bool

    def directed(self, pair: Sides) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and log(b/a)."""
        return (pair.q, pair.p, -pair.ratio) if self.student_first else (pair.p, pair.q, pair.ratio)

    def balanced(self, pair: Sides) -> Tensor:
        return excess(*self.directed(pair))

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        first, _, ratio = self.directed(sides(log_p, log_q))
        return -expect(first, ratio)


@dataclass(frozen=True)
class WeightedSum(Divergence):
    """Σ c_i D_i with every c_i > 0: values and slopes add."""

    parts: tuple[tuple[float, Divergence], ...]

    def __post_init__(self) -> None:
        for weight, part in self.parts:
            if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"weight {weight} of {part}: expected a positive number")

    def balanced(self, pair: Sides) -> Tensor:
        return self._sum(part.balanced(pair) for _, part in self.parts)

    def balanced_slope(self, pair: Sides) -> Tensor:
        return self._sum(part.balanced_slope(pair) for _, part in self.parts)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self._sum(part.value(log_p, log_q) for _, part in self.parts)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self._sum(part.weighted_slope(log_p, log_q) for _, part in self.parts)

    def _sum(self, quantities: Iterable[Tensor]) -> Tensor:
        first, *rest = (weight * quantity for (weight, _), quantity in zip(self.parts, quantities, strict=True))
        return sum(rest, start=first)

    def __str__(self) -> str:
        return " + ".join(str(part) if weight == 1 else f"{shortest(weight)}*{part}" for weight, part in self.parts)


@dataclass(frozen=True)
class ForwardKL(KullbackLeibler):
    student_first = False

    def balanced_slope(self, pair: Sides) -> Tensor:
        return difference(pair.p, pair.q, pair.ratio)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return -log_p.exp()

    def __str__(self) -> str:
        return "forward_kl"


@dataclass(frozen=True)
class ReverseKL(KullbackLeibler):
    student_first = True

    def balanced_slope(self, pair: Sides) -> Tensor:
        return expect(pair.q, pair.ratio)

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

    def balanced(self, pair: Sides) -> Tensor:
        of_p, of_q = self._weights()
        m = interpolation(pair.p, pair.q, self.beta)
        m_to_p, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.beta)
        return of_p * excess(pair.p, m, m_to_p) + of_q * excess(pair.q, m, m_to_q)

    def balanced_slope(self, pair: Sides) -> Tensor:
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.beta)
        return -self._weights()[1] * expect(pair.q, m_to_q)

    def _weights(self) -> tuple[float, float]:
        if self.normalized:
            return 1 / (1 - self.beta), 1 / self.beta
        return self.beta, 1 - self.beta

    def __str__(self) -> str:
        return f"jsd({shortest(self.beta)}, normalized=True)" if self.normalized else f"jsd({shortest(self.beta)})"


@dataclass(frozen=True)
class SkewForwardKL(Divergence):
    alpha: float

    def __post_init__(self) -> None:
        _check_skew("skew_forward_kl", self.alpha)

    def balanced(self, pair: Sides) -> Tensor:
        m_to_p, _ = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, self.alpha)
        return excess(pair.p, interpolation(pair.p, pair.q, self.alpha), m_to_p)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """(1 − α) q (m − p) / m, where m − p = (1 − α)(q − p)."""
        gap = difference(pair.p, pair.q, pair.ratio)
        if self.alpha == 0:  # also where q underflows
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

    def __str__(self) -> str:
        return f"skew_forward_kl({shortest(self.alpha)})"


@dataclass(frozen=True)
class SkewReverseKL(Divergence):
    alpha: float

    def __post_init__(self) -> None:
        _check_skew("skew_reverse_kl", self.alpha)

    def balanced(self, pair: Sides) -> Tensor:
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, 1 - self.alpha)
        return excess(pair.q, interpolation(pair.p, pair.q, 1 - self.alpha), m_to_q)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """q (t − α (e^t − 1)) = q ((1 − α) t − α (e^t − 1 − t)) for t = log(q/m)."""
        _, m_to_q = interpolation_logs(pair.log_p, pair.log_q, pair.ratio, 1 - self.alpha)
        slope = (self.alpha - 1) * expect(pair.q, m_to_q)
        if self.alpha == 0:
            return slope
        of_m = pair.q * (pair.q / interpolation(pair.p, pair.q, 1 - self.alpha))
        return slope - self.alpha * excess(pair.q, of_m, -m_to_q)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        _, m_to_q = interpolation_logs(log_p, log_q, log_ratio(log_q, log_p), 1 - self.alpha)
        return -expect(log_q.exp(), m_to_q)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return self.balanced_slope(sides(log_p, log_q)) + (1 - self.alpha) * log_q.exp()

    def __str__(self) -> str:
        return f"skew_reverse_kl({shortest(self.alpha)})"


@dataclass(frozen=True)
class TotalVariation(Divergence):
    def balanced(self, pair: Sides) -> Tensor:
        return 0.5 * difference(pair.p, pair.q, pair.ratio).abs()

    def balanced_slope(self, pair: Sides) -> Tensor:
        """½ q sign(q − p), less q times the pivot's ½ sign: so it is 0, not ±½, at the argmax."""
        sign = torch.sign(pair.ratio)
        return 0.5 * expect(pair.q, sign if pair.pivot is None else sign - torch.sign(pair.pivot.ratio))

    def __str__(self) -> str:
        return "total_variation"


def weighted_parts(divergence: Divergence) -> tuple[tuple[float, Divergence], ...]:
    """Return the summands of a divergence with their weights; for a single divergence, itself with weight 1."""
    return divergence.parts if isinstance(divergence, WeightedSum) else ((1.0, divergence),)


def shortest(number: float) -> str:
    """Return a short text that reads back as the same number; 1.0 becomes "1"."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _check_skew(name: str, alpha: float) -> None:
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"{name}(alpha={alpha}): expected 0 ≤ alpha < 1; it is zero everywhere at alpha = 1")
