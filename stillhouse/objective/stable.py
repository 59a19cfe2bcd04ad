"""Elementwise functions that keep their digits where two probabilities are close, or one of them is 0.

A student that has come close to its teacher, both sure of a token, is where distillation ends. There every divergence
is a small difference of large numbers: p log(p/q) of the sure token is cancelled by that of all others, and q − p of
two numbers near 1 has no digits left in float32. So nothing is computed as such a difference here: everything is
a multiple of the smaller quantity t = log(b/a), which the caller knows to its last digit,

    b − a           = a (e^t − 1)
    b − a − a·t     = a (e^t − 1 − t)  ≥ 0

by a few terms of the exponential series where |t| < `NEAR`, and as written on the left beyond, where nothing cancels.
What is used several times is kept short: a compiler that makes one kernel of it all follows each use to its inputs
anew.
All functions are differentiable by autograd.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

#: the largest |t| for which the series is used
NEAR = 0.25
#: terms of a series in t that leave a relative error below the dtype's at |t| = NEAR
SERIES_TERMS = {torch.float32: 6, torch.float64: 15}


def expect(probability: Tensor, quantity: Tensor) -> Tensor:
    """probability·quantity with 0·inf = 0, in value and in autograd."""
    return probability * quantity.masked_fill(probability == 0, 0.0)


def log_ratio(log_b: Tensor, log_a: Tensor) -> Tensor:
    """log(b/a), with 0/0 taken as 1 (neither side has mass there, so that nothing depends on it)."""
    return (log_b - log_a).masked_fill((log_a == -math.inf) & (log_b == -math.inf), 0.0)


def difference(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """b − a for t = log(b/a)."""
    small = t.clamp(-NEAR, NEAR)
    return torch.where(t.abs() < NEAR, a * (small + second_order(small)), b - a)


def excess(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """b − a − a·t for t = log(b/a): never negative. a = 0 gives b, b = 0 gives infinity."""
    return torch.where(t.abs() < NEAR, a * second_order(t.clamp(-NEAR, NEAR)), b - a - expect(a, t))


def second_order(t: Tensor) -> Tensor:
    """e^t − 1 − t for |t| < `NEAR`."""
    return t * t * polynomial([1 / math.factorial(n + 2) for n in range(terms(t) - 1)], t)


def polynomial(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """Σ_n c_n tⁿ."""
    result = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * t + coefficient
    return result


def terms(t: Tensor) -> int:
    return SERIES_TERMS.get(t.dtype, SERIES_TERMS[torch.float32])


def log_sum_exp(largest: Tensor, others: Tensor) -> Tensor:
    """log(largest + others) of a sum whose terms are e^l ≤ 1: how many of them are 1, and the sum of the rest.

    Apart, because of a sure token: the sum of the rest, 1e-6, keeps none of its digits in a sum near 1.
    """
    return torch.log1p(others + (largest - 1))


def log_softmax(log_weights: Tensor) -> Tensor:
    """Over the last dim, with the digits of a log-probability near 0; a row without any mass stays without (−inf)."""
    gap = log_weights - log_weights.amax(-1, keepdim=True)
    is_largest = gap == 0
    others = gap.exp().masked_fill(is_largest, 0.0).sum(-1, keepdim=True)
    normalizer = log_sum_exp(is_largest.sum(-1, keepdim=True).to(gap.dtype), others)
    return (gap - normalizer).masked_fill(log_weights == -math.inf, -math.inf)


def mixture(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """m = weight·p + (1 − weight)·q, not quite 0 where both are: to be divided by."""
    return (weight * p + (1 - weight) * q).clamp(min=torch.finfo(p.dtype).tiny)


def mixture_logs(log_p: Tensor, log_q: Tensor, ratio: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """log(m/p) and log(m/q) for m = weight·p + (1 − weight)·q and ratio = log(q/p).

    Near the ends of `weight` by the ratio alone, since one of the logarithms is small there and has to be right to
    the last digit. In between so only where p and q are close; elsewhere by the mixture, whose logarithm rounds as
    log p and log q do.
    """
    if not 0.05 <= weight <= 0.95:
        return _log_one_plus(1 - weight, ratio), _log_one_plus(weight, -ratio)
    near = ratio.abs() < NEAR
    small = ratio.clamp(-NEAR, NEAR)
    of_p = small * polynomial(_log_one_plus_series(1 - weight, terms(small)), small)
    log_m = torch.log(mixture(log_p.exp(), log_q.exp(), weight))
    return torch.where(near, of_p, log_m - log_p), torch.where(near, of_p - small, log_m - log_q)


def _log_one_plus_series(weight: float, terms: int) -> list[float]:
    """c_n of log(1 + weight·(e^t − 1)) = Σ_n c_n tⁿ, n from 1 on: by g' f = f' for g = log f."""
    of_f = [weight / math.factorial(n) for n in range(1, terms + 1)]
    series: list[float] = []
    for n in range(1, terms + 1):
        earlier = sum(k * series[k - 1] * of_f[n - k - 1] for k in range(1, n))
        series.append(of_f[n - 1] - earlier / n)
    return series


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
