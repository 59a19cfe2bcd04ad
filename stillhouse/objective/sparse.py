"""Divergences from a teacher that gives only some ids per row: its top K, ids chosen by the student, or sampled ids.

`sparse` and `sampled` read the statistics of a chunk from its `Tile`, and add weights · ∂value/∂logits to the tile's
gradient.

C rows of a chunk of T tokens, K ids per token, B outcomes (the ids and, with the tail "bucket", one more), M sampled
ids per token. p is the teacher's probability, q the student's, D the divergence. `divergence.py` defines f and h.
"""

import math
from functools import reduce

import torch
from torch import Tensor

from stillhouse.objective.divergence import Divergence, Pivot, WeightedSum, sides, weighted_parts
from stillhouse.objective.numerics import expect, log_ratio, log_softmax
from stillhouse.objective.signals import Sampled, SparseSignal, first_occurrence, teacher_tail
from stillhouse.objective.tile.tile import TermResult, Tile

#: the teacher's log-probability of every token outside its ids with the tail "zero" (NeMo RL's `log_infinitesimal`)
LOG_ZERO = -100.0


def sparse(
    tile: Tile, signal: SparseSignal, divergence: Divergence, temperature: float, weights_C: Tensor
) -> TermResult:
    """Compute a divergence over the K ids of a row. With the tail "bucket", all other tokens are one more outcome.

    An absent id, or a repetition of an id, has log p = log q = −inf and contributes nothing: f and q·h are then 0.
    """
    chunk = signal.rows(tile.rows)
    log_q_CK = tile.log_probs_at(signal.ids_TK, temperature)
    present_CK = first_occurrence(chunk.ids_TK, tile.vocabulary)
    log_p_CK = chunk.log_probs_TK.detach().to(log_q_CK.dtype).masked_fill(~present_CK, -math.inf)
    log_q_CK = log_q_CK.masked_fill(~present_CK, -math.inf)
    argmax_C1 = log_p_CK.argmax(1, keepdim=True)
    statistics = {
        "student_entropy": tile.entropy(temperature),
        "agreement": tile.is_argmax(signal.ids_TK).gather(1, argmax_C1)[:, 0].to(log_q_CK.dtype),
        "teacher_mass": log_p_CK.exp().sum(1),
    }
    if signal.tail == "zero":
        statistics["teacher_entropy"] = entropy(log_softmax(log_p_CK))
        return TermResult(_zero_outside(tile, signal, temperature, log_p_CK, log_q_CK, weights_C), statistics)
    if signal.tail == "renormalize":
        log_p_CB, log_q_CB = log_softmax(log_p_CK), log_softmax(log_q_CK)
    elif signal.tail == "bucket":
        log_q_tail_C = tile.tail(signal, temperature)
        log_p_tail_C = teacher_tail(chunk, log_p_CK, log_q_tail_C)
        log_p_CB = torch.cat([log_p_CK, log_p_tail_C[:, None]], 1)
        log_q_CB = torch.cat([log_q_CK, log_q_tail_C[:, None]], 1)
    else:
        log_p_CB, log_q_CB = log_p_CK, log_q_CK
    statistics["teacher_entropy"] = entropy(log_p_CB)
    values, slope_CB = over_outcomes(divergence, log_p_CB, log_q_CB, is_complete=signal.tail != "drop")
    if tile.needs_gradient:
        _add_sparse_gradient(tile, signal, temperature, slope_CB, log_q_CB, weights_C)
    summands = list(zip(weighted_parts(divergence), values, strict=True))
    value_C = reduce(torch.add, (weight * part_C for (weight, _), part_C in summands))
    parts = {str(part): part_C for (_, part), part_C in summands} if isinstance(divergence, WeightedSum) else {}
    return TermResult(value_C, statistics, parts)


def over_outcomes(
    divergence: Divergence, log_p_CB: Tensor, log_q_CB: Tensor, *, is_complete: bool
) -> tuple[list[Tensor], Tensor]:
    """Return the value [C] of each part of a divergence, and q·h [C, B], over B outcomes.

    is_complete: True if these are all outcomes, so that Σp and Σq are 1. In this case the balanced functions are
    summed (`divergence.py`), so that a rounding error in Σ(q − p) has no effect on a value.
    """
    parts = [part for _, part in weighted_parts(divergence)]
    if not is_complete:
        values = [part.value(log_p_CB, log_q_CB).sum(1) for part in parts]
        return values, divergence.weighted_slope(log_p_CB, log_q_CB)
    ratio_CB = log_ratio(log_q_CB, log_p_CB)
    argmax_C1 = log_q_CB.argmax(1, keepdim=True)
    pivot = Pivot(log_q_CB.gather(1, argmax_C1), ratio_CB.gather(1, argmax_C1))
    pair = sides(log_p_CB, log_q_CB, ratio_CB, pivot)
    return [part.balanced(pair).sum(1) for part in parts], divergence.balanced_slope(pair)


def _add_sparse_gradient(
    tile: Tile, signal: SparseSignal, temperature: float, slope_CB: Tensor, log_q_CB: Tensor, weights_C: Tensor
) -> None:
    """Add weights · ∂D/∂(z_v/τ) = weights · q_v (h_b(v) − Σ_b q_b h_b) for outcomes b; token v is in outcome b(v).

    Each id is an outcome with its own q·h. The bucket's q·h is distributed over the tokens in the bucket in
    proportion to q. The mean Σ_b q_b h_b is subtracted at every token or, with the tail "renormalize", only at the K
    ids.
    """
    weights_C1 = weights_C[:, None]
    ids_CK, mean_C1 = tile.take(signal.ids_TK), slope_CB.sum(1, keepdim=True)
    if signal.tail == "renormalize":
        tile.add_at(ids_CK, expect(weights_C1, slope_CB - log_q_CB.exp() * mean_C1))
        return
    tile.add_probability(temperature, expect(weights_C, -mean_C1[:, 0]))
    tile.add_at(ids_CK, expect(weights_C1, slope_CB[:, : ids_CK.shape[1]]))
    if signal.tail == "bucket":
        tile.add_outside(signal, temperature, expect(weights_C, slope_CB[:, -1]))


def _zero_outside(
    tile: Tile, signal: SparseSignal, temperature: float, log_p_CK: Tensor, log_q_CK: Tensor, weights_C: Tensor
) -> Tensor:
    """Return Σ_v q (log q − log p), [C], with the teacher conditioned on its ids and log p = `LOG_ZERO` elsewhere.

    The derivative with respect to z_v/τ is q_v (log q_v − log p_v − value). It is added in three parts:
    q_v (log q_v − value) at each token, −q_v log p_v at the ids, and −q_v · `LOG_ZERO` at all other tokens.
    """
    has_ids_C = (log_p_CK > -math.inf).any(1)
    cost_CK = -log_softmax(log_p_CK).clamp(min=LOG_ZERO)
    q_CK, outside_C = log_q_CK.exp(), tile.tail(signal, temperature).exp()
    value_C = expect(q_CK, cost_CK).sum(1) - LOG_ZERO * outside_C - tile.entropy(temperature)
    if tile.needs_gradient:
        weights_C = weights_C * has_ids_C
        tile.add_log_probability(temperature, weights_C)
        tile.add_probability(temperature, expect(weights_C, -value_C))
        tile.add_at(tile.take(signal.ids_TK), expect(weights_C[:, None], expect(q_CK, cost_CK)))
        tile.add_outside(signal, temperature, expect(weights_C, -LOG_ZERO * outside_C))
    return value_C.masked_fill(~has_ids_C, 0.0)


def sampled(tile: Tile, signal: Sampled, temperature: float, weights_C: Tensor) -> TermResult:
    """Return the estimated cross-entropy, and add its gradient to the tile."""
    chunk = signal.rows(tile.rows)
    present_CM = (chunk.ids_TM >= 0) & (chunk.ids_TM < tile.vocabulary)
    p_CM = chunk.weights_TM.detach().to(weights_C.dtype).masked_fill(~present_CM, 0.0)
    log_q_CM = tile.log_probs_at(signal.ids_TM, temperature).masked_fill(p_CM == 0, 0.0)
    if tile.needs_gradient:
        tile.add_probability(temperature, expect(weights_C, p_CM.sum(1)))
        tile.add_at(chunk.ids_TM, expect(weights_C[:, None], -p_CM))
    return TermResult(-(p_CM * log_q_CM).sum(1), {"student_entropy": tile.entropy(temperature)})


def entropy(log_probs: Tensor) -> Tensor:
    """Return −Σ p log p over the last dim, with 0·log 0 = 0."""
    return -expect(log_probs.exp(), log_probs).sum(-1)
