"""−log of the share of drafted tokens that speculative decoding accepts.

A draft head samples a token from q, and the model accepts it with the probability min(1, p/q). So the expected share
of accepted drafts and the divergence are

    A = Σ_v min(p_v, q_v) = 1 − ½ Σ_v |p_v − q_v|        D = −log A

D is a function of one sum over the vocabulary, and not itself a sum. With

    S₋ = Σ q over the outcomes with q < p,  S₊ = Σ q over those with q > p   (q = p: one half in both; S₋ + S₊ = 1)

    ∂D/∂z_v · τ = q_v · S₋/A        where q > p
                  −(q_v/A) · S₊     where q < p          half of both where q = p

Each factor is computed without a difference of large numbers, and q/A and S₋/A in log space. So the gradient keeps
its digits where A is near 1, and where p, q and A underflow because both sides are certain of different tokens.

p is the teacher's probability, q the student's. The sums here are over the last dim.

Sources: the accepted share: Leviathan et al. (arXiv 2211.17192); −log A as a loss of draft heads: arXiv 2602.23881.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, Sides, sides
from stillhouse.objective.numerics import difference, finite, row_max
from stillhouse.objective.parameters import AcceptanceParameters


class PieceSums(NamedTuple):
    """Sums over a part of the outcomes, for example over one rank's part of the vocabulary.

    largest: M = max log min(p, q). accepted: Σ min(p, q) / e^M. below: S₋ / e^M. above: S₊. distance: ½ Σ|q − p|.
    """

    largest: Tensor
    accepted: Tensor
    below: Tensor
    above: Tensor
    distance: Tensor


class Acceptance(NamedTuple):
    """Numbers over all outcomes. log_rate: log A. value: −log A. above: S₋/A. below: S₊."""

    log_rate: Tensor
    value: Tensor
    above: Tensor
    below: Tensor


@dataclass(frozen=True)
class NegativeLogAcceptance(AcceptanceParameters, Divergence):
    """−log Σ min(p, q). `value` and `balanced` distribute it over the outcomes in proportion to min(p, q)."""

    def balanced(self, pair: Sides) -> Tensor:
        share, log_rate = _shares(pair)
        distance = 0.5 * difference(pair.p, pair.q, pair.ratio).abs().sum(-1, keepdim=True)
        return _distributed(share, _value(log_rate, distance), pair.log_p)

    def balanced_slope(self, pair: Sides) -> Tensor:
        """Only for all outcomes of a row: from q·h of the sign with less probability, so that nothing cancels."""
        _, log_rate = _shares(pair)
        part = (pair.log_q - log_rate).exp()
        above, below = _where_positive(pair.ratio, part), _where_positive(-pair.ratio, part)
        is_below_more = below.sum(-1, keepdim=True) > above.sum(-1, keepdim=True)
        return _without_teacher(torch.where(is_below_more, above, -below), pair.log_p)

    def value(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        share, log_rate = _shares(sides(log_p, log_q))
        return _distributed(share, -log_rate, log_p)

    def weighted_slope(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        pair = sides(log_p, log_q)
        _, log_rate = _shares(pair)
        return _without_teacher(-_where_positive(-pair.ratio, (log_q - log_rate).exp()), log_p)


def piece_sums(pair: Sides) -> PieceSums:
    log_least = torch.minimum(pair.log_p, pair.log_q)
    largest = row_max(log_least)
    reference = finite(largest)
    return PieceSums(
        largest[..., 0],
        (log_least - reference).exp().sum(-1),
        _where_positive(-pair.ratio, (pair.log_q - reference).exp()).sum(-1),
        _where_positive(pair.ratio, pair.q).sum(-1),
        0.5 * difference(pair.p, pair.q, pair.ratio).abs().sum(-1),
    )


def acceptance_statistics(sums: PieceSums) -> Acceptance:
    """sums: of R pieces, [R, …] each."""
    reference = finite(sums.largest.amax(0))
    scale = (sums.largest - reference).exp()
    accepted = (scale * sums.accepted).sum(0)
    log_rate = reference + accepted.log()
    value, below = _value(log_rate, sums.distance.sum(0)), (scale * sums.below).sum(0) / accepted
    return Acceptance(log_rate, value, below, sums.above.sum(0))


def gradient_of_acceptance(pair: Sides, log_rate: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """Return ∂D/∂z · τ, elementwise. log_rate, above, below: the numbers of `Acceptance` for each row, [rows, 1]."""
    scaled_below = below * (pair.log_q - log_rate).exp()
    return _where_positive(pair.ratio, above * pair.q) - _where_positive(-pair.ratio, scaled_below)


def _shares(pair: Sides) -> tuple[Tensor, Tensor]:
    """Return min(p, q) / A, and log A with a last dim of 1."""
    log_least = torch.minimum(pair.log_p, pair.log_q)
    reference = finite(row_max(log_least).detach())
    least = (log_least - reference).exp()
    accepted = least.sum(-1, keepdim=True)
    return least / accepted, reference + accepted.log()


def _value(log_rate: Tensor, distance: Tensor) -> Tensor:
    """−log A; near A = 1 from 1 − A, which has more digits."""
    return torch.where(log_rate < math.log(0.5), -log_rate, -torch.log1p(-distance.clamp(max=0.75)))


def _distributed(share: Tensor, value: Tensor, log_p: Tensor) -> Tensor:
    """Return the value, distributed in proportion to `share`; all of it is infinite if it is."""
    infinite = torch.full_like(share, math.inf)
    return _without_teacher(torch.where(value == math.inf, infinite, share.detach() * value), log_p)


def _without_teacher(quantity: Tensor, log_p: Tensor) -> Tensor:
    """Replace the quantity by 0 in rows where the teacher gives no outcome, as a sparse signal's absent rows."""
    return quantity.masked_fill(row_max(log_p) == -math.inf, 0.0)


def _where_positive(ratio: Tensor, quantity: Tensor) -> Tensor:
    """The quantity where the ratio is positive, half of it where the ratio is 0, and else 0."""
    return torch.where(ratio > 0, quantity, torch.where(ratio < 0, 0.0, 0.5 * quantity))
