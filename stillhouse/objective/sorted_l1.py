"""A distance between two distributions without a common vocabulary: both are sorted, then compared by rank.

Universal Logit Distillation (arXiv 2402.12030): Σ_i |p_(i) − q_(i)|, where p_(i) and q_(i) are the i-th largest
probabilities of teacher and student. The teacher gives its K largest probabilities. On each side, the sum of all
smaller probabilities counts as one more outcome, so that the value is 0 if both sides are equal. The result is a
lower bound of the distance over all i, and equal to this distance if K is the size of the vocabulary.

T tokens, C rows of a chunk, K ranks, B = K + 1 outcomes.
"""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.numerics import expect
from stillhouse.objective.signals import Signal, check_per_token
from stillhouse.objective.terms import SignalTerm
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import Plan


@dataclass(frozen=True, eq=False)
class SortedTopK(Signal):
    """The log-probabilities of the teacher's top K tokens in any order, without their ids.

    tail_log_prob_T: the log of the teacher's mass outside the top K. weights_T: 1 at rows where the distributions of
    teacher and student can be compared, else 0.
    """

    log_probs_TK: Tensor
    tail_log_prob_T: Tensor
    weights_T: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.log_probs_TK.shape)
        if len(shape) != 2 or shape[1] == 0:
            raise ValueError(f"log_probs_TK of shape {shape}: expected [tokens, ranks], with one rank or more")
        check_per_token(shape[0], tail_log_prob_T=self.tail_log_prob_T, weights_T=self.weights_T)

    def sorted_probabilities(self, dtype: torch.dtype) -> Tensor:
        """p_(1) ≥ … ≥ p_(K), then the mass outside the top K, [T, B]."""
        log_p_TK = self.log_probs_TK.detach().to(dtype).sort(1, descending=True).values
        return torch.cat([log_p_TK, self.tail_log_prob_T.detach().to(dtype)[:, None]], 1).exp()


@dataclass(frozen=True, eq=False)
class SortedL1(SignalTerm):
    """Σ_b |p_(b) − q_(b)| over the sorted outcomes, at a temperature that divides the student's logits.

    `scale_by_temperature_squared` multiplies by τ², as in `Distill`.
    """

    signal: SortedTopK
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None

    name = "uld"

    def request(self, plan: Plan) -> None:
        plan.softmax(self.temperature)
        plan.top_k(self.signal.log_probs_TK.shape[1])

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        """The derivative of |p_(b) − q_(b)| with respect to q_(b) is sign(q_(b) − p_(b)); the order is constant."""
        ids_CK, log_q_CK = tile.top_k(self.signal.log_probs_TK.shape[1], self.temperature)
        q_CK = log_q_CK.exp()
        # 1 − Σq is precise enough here: its absolute rounding error is as small as that of the other summands
        q_tail_C1 = (1 - q_CK.sum(1, keepdim=True)).clamp(min=0.0)
        p_CB = self.signal.rows(tile.rows).sorted_probabilities(q_CK.dtype)
        gap_CB = torch.cat([q_CK, q_tail_C1], 1) - p_CB
        if tile.needs_gradient:
            slope_CB = gap_CB.sign()
            relative_CK = q_CK * (slope_CB[:, :-1] - slope_CB[:, -1:])
            weights_C = weights_C * (self.factor / self.temperature)
            # q·(h − Σq·h), where the tail's slope is subtracted from all h, so that h = 0 outside the top K
            tile.add_probability(self.temperature, expect(weights_C, -relative_CK.sum(1)))
            tile.add_at(ids_CK, expect(weights_C[:, None], relative_CK))
        return TermResult(gap_CB.abs().sum(1) * self.factor, {})


def sorted_l1(log_p_TB: Tensor, log_q_TV: Tensor) -> Tensor:
    """The value in plain autograd, [T]. log_p_TB: the teacher's top K in any order, then the mass outside them."""
    ranks = log_p_TB.shape[1] - 1
    p_TK = log_p_TB[:, :-1].exp().sort(1, descending=True).values
    missing = max(0, ranks - log_q_TV.shape[1])
    q_TV = torch.nn.functional.pad(log_q_TV, (0, missing), value=-math.inf).exp().sort(1, descending=True).values
    outside_T = q_TV[:, ranks:].sum(1) - log_p_TB[:, -1].exp()
    return (q_TV[:, :ranks] - p_TK).abs().sum(1) + outside_T.abs()
