"""What a teacher can say about a token, from everything (its hidden states and head) to a few sampled ids.

A dense signal gives log-probabilities over the whole vocabulary. A sparse one gives K ids and their
log-probabilities, and names what is to become of the mass outside (`tail`):

    "bucket"       one more outcome that holds the mass outside, on each side. Nothing is left unpunished, and the
                   result is a lower bound of the full divergence for every f-divergence (not so for alpha-beta with
                   α + β ≠ 1, where it is a divergence between the bucketed distributions all the same).
    "renormalize"  both sides conditioned on the K ids. The student's mass outside costs nothing.
    "drop"         the sum over the K ids alone. It can be negative.
    "zero"         for reverse KL alone: the teacher is conditioned on the K ids, and gives each token outside of them
                   e^−100. What the student puts there costs about 100 nats times its mass (NeMo RL's
                   `zero_outside_topk`).

Row t of a signal is the distribution of token t + 1, the one that labels_T[t] names.
T tokens, E teacher width, V vocabulary, K ids per token, M sampled ids per token.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from stillhouse.objective.head import OutputHead

Tail = Literal["bucket", "renormalize", "drop", "zero"]
Rows = Tensor | slice

#: what is taken as the teacher's mass outside its top-k when it did not send it and 1 − Σp rounds to nothing
TAIL_FLOOR = torch.finfo(torch.float32).eps


class Signal(ABC):
    """A teacher's word on T tokens. Tensors are taken as given; none receives a gradient."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """T, the number of rows."""

    @abstractmethod
    def rows(self, rows: Rows) -> Self:
        """The same signal on some of its rows."""

    def heads(self) -> list[OutputHead]:
        """The output heads that the signal carries, for the vocabulary that all sides share."""
        return []


@dataclass(frozen=True, eq=False)
class FullVocab(Signal):
    """Exact: the teacher's hidden states before its head, and the head. V / E times smaller than its logits."""

    hidden_TE: Tensor
    head: OutputHead

    def __post_init__(self) -> None:
        width = self.head.weight_VD.shape[1]
        if self.hidden_TE.dim() != 2 or self.hidden_TE.shape[1] != width:
            raise ValueError(
                f"hidden_TE of shape {tuple(self.hidden_TE.shape)}: expected [tokens, {width}] for this head"
            )

    @property
    def tokens(self) -> int:
        return self.hidden_TE.shape[0]

    def rows(self, rows: Rows) -> "FullVocab":
        return replace(self, hidden_TE=self.hidden_TE[rows])

    def heads(self) -> list[OutputHead]:
        return [self.head]


@dataclass(frozen=True, eq=False)
class DenseLogits(Signal):
    """The teacher's logits themselves, for small models and tests."""

    logits_TV: Tensor

    def __post_init__(self) -> None:
        if self.logits_TV.dim() != 2:
            raise ValueError(f"logits_TV of shape {tuple(self.logits_TV.shape)}: expected [tokens, vocabulary]")

    @property
    def tokens(self) -> int:
        return self.logits_TV.shape[0]

    def rows(self, rows: Rows) -> "DenseLogits":
        return replace(self, logits_TV=self.logits_TV[rows])


@dataclass(frozen=True, eq=False)
class SparseSignal(Signal):
    """K ids per token with the teacher's log-probabilities over the whole vocabulary.

    An id that is negative or beyond the vocabulary is an absent entry; one that comes twice in a row counts once,
    at its first place.
    `tail_log_prob_T`: the teacher's log-mass outside the ids. Without it, 1 − Σp but at least `TAIL_FLOOR`: in
    float32 that difference is zero or negative for a third of peaked rows, so send it where you can.
    `temperature`: the one at which the log-probabilities were taken; None: at the term's own.
    """

    ids_TK: Tensor
    log_probs_TK: Tensor
    tail: Tail = "bucket"
    tail_log_prob_T: Tensor | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        check_pairs("ids_TK", self.ids_TK, "log_probs_TK", self.log_probs_TK)
        if self.tail not in get_args(Tail):
            raise ValueError(f"tail={self.tail!r}: expected one of {', '.join(get_args(Tail))}")
        if self.tail_log_prob_T is not None and self.tail_log_prob_T.shape != self.ids_TK.shape[:1]:
            raise ValueError(
                f"tail_log_prob_T of shape {tuple(self.tail_log_prob_T.shape)}: expected ({self.tokens},), "
                "one per token"
            )

    @property
    def tokens(self) -> int:
        return self.ids_TK.shape[0]

    def rows(self, rows: Rows) -> Self:
        tail_T = self.tail_log_prob_T
        return replace(
            self,
            ids_TK=self.ids_TK[rows],
            log_probs_TK=self.log_probs_TK[rows],
            tail_log_prob_T=None if tail_T is None else tail_T[rows],
        )


class TopK(SparseSignal):
    """The K likeliest ids of the teacher: what a server or a cache can say."""


class Chosen(SparseSignal):
    """Ids that the student chose, scored by the teacher."""


@dataclass(frozen=True, eq=False)
class Sampled(Signal):
    """Ids drawn from the teacher, with importance weights: unbiased for the gradient of forward KL.

    Random sampling distillation (arXiv 2503.16870): draws from a proposal r with weights (p/r) that are averaged.
    Σ_m weight·[id = v] estimates p_v, so the value is a cross-entropy: forward KL plus the teacher's entropy.
    An id that is negative or beyond the vocabulary is an absent entry; repeated ids add up.
    """

    ids_TM: Tensor
    weights_TM: Tensor

    def __post_init__(self) -> None:
        check_pairs("ids_TM", self.ids_TM, "weights_TM", self.weights_TM)

    @property
    def tokens(self) -> int:
        return self.ids_TM.shape[0]

    def rows(self, rows: Rows) -> "Sampled":
        return replace(self, ids_TM=self.ids_TM[rows], weights_TM=self.weights_TM[rows])


def check_pairs(ids_name: str, ids: Tensor, values_name: str, values: Tensor) -> None:
    if ids.dim() != 2 or ids.shape != values.shape or ids.shape[1] == 0:
        raise ValueError(
            f"{ids_name} of shape {tuple(ids.shape)} and {values_name} of shape {tuple(values.shape)}: "
            "expected the same two dims, [tokens, entries], with one entry or more"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{ids_name} of dtype {ids.dtype}: expected int32 or int64")


def first_occurrence(ids_TK: Tensor, vocabulary: int) -> Tensor:
    """True where an id is inside the vocabulary and has not come earlier in its row. [T, K] → [T, K] bool."""
    order_TK = torch.argsort(ids_TK, dim=1, stable=True)
    sorted_TK = ids_TK.gather(1, order_TK)
    repeated_TK = torch.zeros_like(ids_TK, dtype=torch.bool)
    repeated_TK[:, 1:] = sorted_TK[:, 1:] == sorted_TK[:, :-1]
    repeated_TK = torch.zeros_like(repeated_TK).scatter(1, order_TK, repeated_TK)
    return (ids_TK >= 0) & (ids_TK < vocabulary) & ~repeated_TK


def teacher_tail(signal: SparseSignal, log_p_TK: Tensor, student_tail_T: Tensor) -> Tensor:
    """The teacher's log-mass outside the ids, [T].

    The floor stands in for digits that float32 has lost; where the student has no outcome outside the ids at all
    (K = V), there is nothing to stand in for and the mass is zero.
    """
    if signal.tail_log_prob_T is not None:
        return signal.tail_log_prob_T.to(log_p_TK.dtype)
    mass_T = log_p_TK.exp().sum(1)
    computed_T = torch.log1p(-mass_T.clamp(max=1 - TAIL_FLOOR))
    return computed_T.masked_fill(student_tail_T == -math.inf, -math.inf)
