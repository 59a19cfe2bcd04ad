"""Elementwise functions that keep their digits where two probabilities are close, or one of them is 0.

Late in distillation, the student is close to the teacher and both give one token a probability near 1. In this case
every divergence is a small difference of large numbers: p log(p/q) of this token cancels against the sum over all
other tokens, and q − p of two numbers near 1 has no correct digits left in float32. So these functions do not compute
such differences. They use the small quantity t = log(b/a), which the caller has computed to full precision:

    b − a           = a (e^t − 1)
    b − a − a·t     = a (e^t − 1 − t)  ≥ 0

For |t| < `NEAR`, the right side is computed with a few terms of the exponential series. For larger |t|, the left side
is computed, because its digits do not cancel. A compiler that fuses operations computes an expression again at each
of its uses, so expressions with several uses are kept short. Autograd can differentiate all functions.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stillhouse.dry_run import replaceable

#: the series are used for |t| below this number
NEAR = 0.25
#: the number of terms with which the relative error of a series at |t| = NEAR is below the dtype's precision
SERIES_TERMS = {torch.float32: 6, torch.float64: 15}


@replaceable
def is_readable(tensor: Tensor) -> bool:
    """Return True if the values of a tensor can be checked without waiting for a device."""
    return tensor.device.type == "cpu"


def expect(probability: Tensor, quantity: Tensor) -> Tensor:
    """Return probability·quantity with 0·inf = 0, also in the gradient."""
    return probability * quantity.masked_fill(probability == 0, 0.0)


def log_ratio(log_b: Tensor, log_a: Tensor) -> Tensor:
    """Return log(b/a), or 0 where a = b = 0, because no result depends on the ratio of two zeros."""
    return (log_b - log_a).masked_fill((log_a == -math.inf) & (log_b == -math.inf), 0.0)


def difference(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Return b − a for t = log(b/a)."""
    small = t.clamp(-NEAR, NEAR)
    return torch.where(t.abs() < NEAR, a * (small + second_order(small)), b - a)


def excess(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Return b − a − a·t ≥ 0 for t = log(b/a). For a = 0 the result is b; for b = 0 < a it is infinity."""
    return torch.where(t.abs() < NEAR, a * second_order(t.clamp(-NEAR, NEAR)), b - a - expect(a, t))


def second_order(t: Tensor) -> Tensor:
    """Return e^t − 1 − t for |t| ≤ `NEAR`."""
    return t * t * polynomial([1 / math.factorial(n + 2) for n in range(terms(t) - 1)], t)


def polynomial(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """Return Σ_n c_n tⁿ for coefficients c_0, c_1, …."""
    result = torch.full_like(t, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * t + coefficient
    return result


def terms(t: Tensor) -> int:
    return SERIES_TERMS.get(t.dtype, SERIES_TERMS[torch.float32])


def row_max(logits: Tensor) -> Tensor:
    """Return the largest value over the last dim, kept with size 1; −inf if that dim is empty (an empty shard)."""
    if logits.shape[-1] == 0:
        return logits.new_full((*logits.shape[:-1], 1), -math.inf)
    return logits.amax(-1, keepdim=True)


def finite(reference: Tensor) -> Tensor:
    """Replace a largest logit of −inf (in a row without mass) by 0, because −inf − (−inf) would be NaN."""
    return torch.where(reference == -math.inf, 0.0, reference)


def log_sum_exp(largest: Tensor, others: Tensor) -> Tensor:
    """Return log Σ e^l for l ≤ 0. largest: the number of e^l that are 1. others: the sum of all smaller e^l.

    `others` is separate, because it can be as small as 1e-6, and would lose its digits in a sum with 1.
    """
    return torch.log1p(others + (largest - 1))


def log_softmax(log_weights: Tensor) -> Tensor:
    """Return the log_softmax over the last dim, precise for log-probabilities near 0; −inf in rows without mass."""
    gap = log_weights - row_max(log_weights)
    is_largest = gap == 0
    others = gap.exp().masked_fill(is_largest, 0.0).sum(-1, keepdim=True)
    normalizer = log_sum_exp(is_largest.sum(-1, keepdim=True).to(gap.dtype), others)
    return (gap - normalizer).masked_fill(log_weights == -math.inf, -math.inf)


def interpolation(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """Return m = weight·p + (1 − weight)·q, at least the smallest normal number, so that m can be a divisor."""
    return (weight * p + (1 - weight) * q).clamp(min=torch.finfo(p.dtype).tiny)


def interpolation_logs(log_p: Tensor, log_q: Tensor, ratio: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return log(m/p) and log(m/q) for m = weight·p + (1 − weight)·q and ratio = log(q/p).

    If `weight` is near 0 or 1, one of the two logs is small and needs full precision, so both logs are computed from
    the ratio alone. For other weights, they are computed from the ratio only where p and q are close. Where p and q
    are not close, they are computed from log m, whose rounding error is as large as that of log p and log q.
    """
    if not 0.05 <= weight <= 0.95:
        return _log_one_plus(1 - weight, ratio), _log_one_plus(weight, -ratio)
    near = ratio.abs() < NEAR
    small = ratio.clamp(-NEAR, NEAR)
    series_p = small * polynomial(log_one_plus_series(1 - weight, terms(small)), small)
    log_m = torch.log(interpolation(log_p.exp(), log_q.exp(), weight))
    return torch.where(near, series_p, log_m - log_p), torch.where(near, series_p - small, log_m - log_q)


def log_one_plus_series(weight: float, terms: int) -> list[float]:
    """Return the coefficients c_1, c_2, … of log(1 + weight·(e^t − 1)) = Σ_n c_n tⁿ.

    They follow from g' f = f' for f = 1 + weight·(e^t − 1) and g = log f.
    """
    coefficients = [weight / math.factorial(n) for n in range(1, terms + 1)]
    series: list[float] = []
    for n in range(1, terms + 1):
        earlier = sum(k * series[k - 1] * coefficients[n - k - 1] for k in range(1, n))
        series.append(coefficients[n - 1] - earlier / n)
    return series


def _log_one_plus(weight: float, ratio: Tensor) -> Tensor:
    """Return log(1 + weight·(e^ratio − 1)), to full relative precision for every weight in [0, 1] and every ratio.

    No single form keeps its digits for all ratios, so three forms are used. The plain logarithm of
    (1 − weight) + weight·e^ratio is used for a weight above 0.5 and a ratio below −0.5; a form with the ratio
    factored out, for a ratio above 30, so that e^ratio does not overflow; and log1p for all other ratios, since the
    result is small near ratio = 0. The ratio is clamped to the range of each form, so that autograd sees no infinity
    in a form that is not selected.
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
