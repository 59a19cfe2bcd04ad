"""Signals and terms of a teacher with another tokenizer: probabilities of spans of text, and sorted probabilities.

Where student and teacher split a text into different tokens, a span is the text between two common token borders. It
has student tokens y_0 … y_k, teacher tokens x_0 … x_l and the probability P = Π_j p(x_j) (GOLD's merged probability).

    row of y_0          a divergence over the student's ids; P counts for y_0
    rows of y_1 … y_k   P · (−log q(y_j))

By the chain rule, forward KL of the whole span is forward KL at the row of y_0 plus the values at the rows of y_1 …
y_k. The other divergences have the same values at the rows of y_1 … y_k.

Without a common vocabulary, Universal Logit Distillation (arXiv 2402.12030) compares by rank: Σ_i |p_(i) − q_(i)|,
where p_(i) and q_(i) are the i-th largest probabilities of teacher and student. The teacher gives its K largest ones.
On each side, the sum of all smaller probabilities counts as one more outcome, so that the value is 0 if both sides
are equal. The result is a lower bound of the distance over all i, and equal to it if K is the vocabulary's size.

T tokens, C rows of a chunk, K ranks, B = K + 1 outcomes. p is the teacher's probability, q the student's.
"""

import math
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from stillhouse.objective.numerics import expect
from stillhouse.objective.sampled_terms import SampledTerm
from stillhouse.objective.signals import Signal, TopK, check_per_token
from stillhouse.objective.terms import SignalTerm, labelled
from stillhouse.objective.tile.tile import TermResult, Tile
from stillhouse.objective.tile.tile_plan import TilePlan


@dataclass(frozen=True, eq=False)
class SpanSignal(Signal):
    """A teacher's probabilities of spans.

    first: the distribution at rows that predict a span's first token. first_weights_T: 1 at these rows, else 0.
    continuation_weights_T: P at rows that predict a later token of a span, else 0.
    """

    first: TopK
    first_weights_T: Tensor
    continuation_weights_T: Tensor

    def __post_init__(self) -> None:
        names = ("first_weights_T", "continuation_weights_T")
        check_per_token(self.first.tokens, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True, eq=False)
class Continuation(SampledTerm):
    """−log q(label) at a temperature that divides the student's logits, for the later tokens of spans.

    Its metric is not called cross-entropy, because it is a part of the divergence. The options are as in `Distill`.
    """

    labels_T: Tensor
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None
    label: str | None = None

    @property
    def name(self) -> str:
        return labelled("continuation", self.label)

    def of(self, tile: Tile, log_q_C: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        return -log_q_C * self.factor, torch.full_like(log_q_C, -self.factor), {}


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


@dataclass(frozen=True, eq=False)
class SortedL1(SignalTerm):
    """Σ_b |p_(b) − q_(b)| over the sorted outcomes, at a temperature that divides the student's logits."""

    signal: SortedTopK
    scale: float = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    _: KW_ONLY
    weights_T: Tensor | None = None

    name = "uld"

    def request(self, plan: TilePlan) -> None:
        plan.softmax(self.temperature)
        plan.top_k(self.signal.log_probs_TK.shape[1])

    def add_to(self, tile: Tile, weights_C: Tensor) -> TermResult:
        """The derivative of |p_(b) − q_(b)| with respect to q_(b) is sign(q_(b) − p_(b)); the order is constant."""
        ids_CK, log_q_CK = tile.top_k(self.signal.log_probs_TK.shape[1], self.temperature)
        q_CK = log_q_CK.exp()
        # 1 − Σq is precise enough here: its absolute rounding error is as small as that of the other summands
        q_tail_C1 = (1 - q_CK.sum(1, keepdim=True)).clamp(min=0.0)
        teacher = self.signal.rows(tile.rows)
        log_p_CK = teacher.log_probs_TK.detach().to(q_CK.dtype).sort(1, descending=True).values
        p_CB = torch.cat([log_p_CK, teacher.tail_log_prob_T.detach().to(q_CK.dtype)[:, None]], 1).exp()
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
