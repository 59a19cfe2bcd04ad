"""Divergences between a teacher's probabilities p and a student's probabilities q, each as two pointwise functions.

    D(p, q)  = Σ_v f(log p_v, log q_v)                  summed over the vocabulary, or over another set of outcomes v
    h_v      = ∂D/∂q_v                                  as if the q_v were independent of each other
    ∂D/∂z_v  = q_v (h_v − Σ_u q_u h_u) / τ              the gradient with respect to the logits z at temperature τ

The code computes q·h instead of h. For forward KL, for example, h = −p/q overflows where q underflows, but
q·h = −p does not.

Over complete distributions, Σ(q − p) is 0. So adding c (q − p) to f, and c to h, changes neither D nor its gradient,
for any constant c. The docstring of each divergence in `divergences.py` states a c with which f is never negative,
and f and h are 0 where p = q. With this c, a small divergence is a sum of small numbers, which keeps its digits even
if student and teacher are close and both give one token a probability near 1 (`numerics.py`). The pass sums these
"balanced" functions:

    balanced        f + c (q − p)
    balanced_slope  q (h + c)

`value` and `weighted_slope` are the textbook's f and q·h, with c = 0. Sums over only a part of the outcomes (a top-k
signal with the tail "drop") use them, because such sums depend on c.

All inputs are log-probabilities. A probability of zero is a log-probability of −inf. In these functions 0·log 0 is
0, never NaN, and a divergence that is truly infinite (forward KL where the teacher has mass and the student has none)
is inf. Autograd can differentiate all functions. `reference.py` computes its gradients with autograd, and tests
compare them with the slopes.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stillhouse.objective.divergence_parameters import Definition, Parameters, require_weight, shortest
from stillhouse.objective.numerics import excess, expect, log_ratio


class Pivot(NamedTuple):
    """log q and log(q/p) of the pivot (`Sides`) of each row, [rows, 1]."""

    log_q: Tensor
    ratio: Tensor


class Sides(NamedTuple):
    """The probabilities p of a teacher and q of a student for the same outcomes, elementwise.

    ratio: log(q/p), which can have more correct digits than log_q − log_p. It can be NaN where p = q = 0, so use it
        only in products with a probability (`expect`).
    pivot: an outcome, usually the most probable one, or None. A divergence whose h is large where p and q are close
        and near 1 subtracts the pivot's h from every h. Over complete distributions, the gradient stays the same.
    """

    log_p: Tensor
    log_q: Tensor
    p: Tensor
    q: Tensor
    ratio: Tensor
    pivot: Pivot | None


def sides(log_p: Tensor, log_q: Tensor, ratio: Tensor | None = None, pivot: Pivot | None = None) -> Sides:
    """Return the `Sides` of these log-probabilities. ratio: log(q/p), by default log q − log p."""
    ratio = log_ratio(log_q, log_p) if ratio is None else ratio
    return Sides(log_p, log_q, log_p.exp(), log_q.exp(), ratio, pivot)


@dataclass(frozen=True, eq=False)
class Divergence(Parameters):
    """D(p, q) as two pointwise functions. Sums and positive multiples of divergences are divergences.

    A subclass is a frozen dataclass whose fields are the divergence's parameters, such as

        @dataclass(frozen=True)
        class TriangularDiscrimination(Divergence):
            alpha: float = 0.5

            def balanced(self, pair):                      # f = (p − q)² / m, m = αp + (1 − α)q
                gap, m = self.gap(pair)
                return gap * (gap / m)

            def balanced_slope(self, pair):                # q·∂f/∂q = q·(2 (q − p)/m − (1 − α) (q − p)²/m²)
                gap, m = self.gap(pair)
                return (pair.q / m) * gap * (2 - (1 - self.alpha) * (gap / m))

            def gap(self, pair):
                m = interpolation(pair.p, pair.q, self.alpha)
                return difference(pair.p, pair.q, pair.ratio), m

    An expression names it by `package.module:Class`, as in `0.5*my_module:TriangularDiscrimination(0.3)`. It then
    passes the check of `custom_divergences.py`. The contract of the two methods:

    - They are elementwise: all tensors of `pair` have the same shape, usually [tokens, vocabulary], and so has the
      result, with the same dtype (float32 in a run, float64 in the check). A tensor may be a shard of the vocabulary.
    - They are finite where p or q is 0, where log p or log q is −inf, and where e^(log p) underflows, and 0 where
      both are 0. A class whose divergence is truly infinite there says so in `definition.infinite`.
    - torch.compile reads them: no `.item()`, and no Python condition on a tensor's values. Autograd must be able to
      differentiate `balanced`. `numerics.py` has functions that keep the digits where p and q are close.

    definition: its texts; by default, the name is `package.module:Class`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = getattr(cls, "definition", None)
        if inherited is None or (":" in inherited.name and "definition" not in vars(cls)):  # of another path
            cls.definition = Definition(f"{cls.__module__}:{cls.__qualname__}", "", "")

    @classmethod
    def divergence(cls) -> "type[Divergence]":
        return cls

    @abstractmethod
    def balanced(self, pair: Sides) -> Tensor:
        """Return f + c·(q − p) ≥ 0, elementwise, in nats. Its sum over a complete distribution is D."""

    @abstractmethod
    def balanced_slope(self, pair: Sides) -> Tensor:
        """Return q·(∂f/∂q + c), elementwise. c is one number per row. The result is 0 or small where p = q."""

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return f(log p, log q), elementwise, in nats."""
        return self.balanced(sides(log_p, log_q))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return q·∂f/∂q, elementwise."""
        return self.balanced_slope(sides(log_p, log_q))

    def __add__(self, other: "Divergence") -> "Divergence":
        return WeightedSum(weighted_parts(self) + weighted_parts(other))

    def __mul__(self, coefficient: float) -> "Divergence":
        if isinstance(coefficient, bool):  # True would count as 1, but is probably a misplaced argument
            raise ValueError(f"{coefficient}*({self}): expected a positive number")
        parts = tuple((coefficient * weight, part) for weight, part in weighted_parts(self))
        return parts[0][1] if len(parts) == 1 and parts[0][0] == 1 else WeightedSum(parts)

    __rmul__ = __mul__


class KullbackLeibler(Divergence):
    """KL(a‖b). Either a is the teacher and b the student, or a is the student and b the teacher.

    The sums of a KL can be computed from unnormalized probabilities and normalized afterwards (`statistics.py`). So
    one sweep over the logits gives these sums together with the normalizers, and vocabulary shards need one
    all-gather.
    """

    #: True if a is the student
    student_first: bool

    def directed(self, pair: Sides) -> tuple[Tensor, Tensor, Tensor]:
        """Return a, b and log(b/a)."""
        return (pair.q, pair.p, -pair.ratio) if self.student_first else (pair.p, pair.q, pair.ratio)

    def balanced(self, pair: Sides) -> Tensor:
        return excess(*self.directed(pair))

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        first, _, ratio = self.directed(sides(log_p, log_q))
        return -expect(first, ratio)


@dataclass(frozen=True)
class WeightedSum(Divergence):
    """Σ c_i D_i with every c_i > 0. Its value and slope are the weighted sums of the parts' values and slopes."""

    parts: tuple[tuple[float, Divergence], ...]

    def __post_init__(self) -> None:
        for weight, part in self.parts:
            require_weight(weight, part)

    def balanced(self, pair: Sides) -> Tensor:
        return reduce(torch.add, (weight * part.balanced(pair) for weight, part in self.parts))

    def balanced_slope(self, pair: Sides) -> Tensor:
        return reduce(torch.add, (weight * part.balanced_slope(pair) for weight, part in self.parts))

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return reduce(torch.add, (weight * part.value(log_p, log_q) for weight, part in self.parts))

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return reduce(torch.add, (weight * part.weighted_slope(log_p, log_q) for weight, part in self.parts))

    def __str__(self) -> str:
        return " + ".join(str(part) if weight == 1 else f"{shortest(weight)}*{part}" for weight, part in self.parts)


def weighted_parts(divergence: Divergence) -> tuple[tuple[float, Divergence], ...]:
    """Return the summands of a divergence with their weights; a single divergence has the weight 1."""
    return divergence.parts if isinstance(divergence, WeightedSum) else ((1.0, divergence),)
