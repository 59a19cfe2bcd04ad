"""The types of a teacher's signal, from exact hidden states with a head to a few sampled ids.

A dense signal gives log-probabilities over the whole vocabulary. A sparse signal gives K ids and their
log-probabilities; its `tail` defines how the mass outside the K ids counts:

    "bucket"       teacher and student each get one more outcome with all of their mass outside the ids. For every
                   f-divergence, the result is a lower bound of the full divergence. (For alpha-beta with α + β ≠ 1,
                   the result is a divergence of the bucketed distributions, but not a bound.)
    "renormalize"  teacher and student are both conditioned on the K ids. The student's mass outside the ids costs
                   nothing.
    "drop"         the divergence is summed over the K ids only, so the result can be negative.
    "zero"         only for reverse KL: the teacher is conditioned on the K ids and gives e^−100 to every other token.
                   So the student's mass outside the ids costs about 100 nats per unit of mass (NeMo RL's
                   `zero_outside_topk`).

Row t of a signal is the distribution of token t + 1, which is labels_T[t].
T tokens, D and E widths of student and teacher, V vocabulary, K ids per token, M sampled ids per token.
p is the teacher's probability, q the student's.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from torch import Tensor

from stillhouse.objective.head import OutputHead, detached

Tail = Literal["bucket", "renormalize", "drop", "zero"]
#: a selection of tokens: their indices, or a slice
RowIndex: TypeAlias = Tensor | slice

#: the lower limit of the teacher's mass outside its ids, where this mass is computed as 1 − Σp
TAIL_FLOOR = torch.finfo(torch.float32).eps


@dataclass(frozen=True, eq=False)
class Signal:
    """A teacher's output for T tokens, without gradients.

    A subclass is a dataclass. Each of its fields that is a tensor, a signal or a tuple of tensors or signals has one
    row per token, and its first field is such a field.
    """

    @property
    def tokens(self) -> int:
        """The number of rows, T."""
        first = getattr(self, fields(self)[0].name)
        first = first[0] if isinstance(first, tuple) else first
        # with `len`, torch.compile would make the number a constant
        return first.tokens if isinstance(first, Signal) else first.shape[0]

    def rows(self, rows: RowIndex) -> Self:
        """Return the signal of these rows."""
        return replace(self, **{field.name: _rows_of(getattr(self, field.name), rows) for field in fields(self)})

    @property
    def temperature(self) -> float | None:
        """The temperature of the signal's probabilities.

        It is None if the signal has logits, or if its probabilities are at the term's temperature.
        """
        return None

    def require_temperature(self, temperature: float) -> None:
        """Raise ValueError if the signal's probabilities are at another temperature."""
        if self.temperature not in (None, temperature):
            raise ValueError(
                f"the teacher's probabilities are at temperature {self.temperature}, the term needs them at "
                f"{temperature}; expected the same temperature: compute them again, or change the term's temperature"
            )

    def heads(self) -> list[OutputHead]:
        """The output heads in the signal; the common vocabulary depends on their sizes."""
        return []

    def opened(self, student: OutputHead) -> AbstractContextManager["Signal"]:
        """Return a context that yields the signal with its output head. The head can be freed when the context ends.

        student: the student's head.
        """
        return nullcontext(self)


#: the signals of a micro-batch, by teacher name; empty without a teacher
Signals: TypeAlias = Mapping[str, Signal]
#: the name of the teacher if there is only one
TEACHER = "teacher"


@dataclass(frozen=True, eq=False)
class FullVocab(Signal):
    """The exact signal: a teacher's last hidden states, V / E times smaller than its logits, and its head."""

    hidden_TE: Tensor
    head: OutputHead

    def __post_init__(self) -> None:
        width = self.head.weight_VD.shape[1]
        if self.hidden_TE.dim() != 2 or self.hidden_TE.shape[1] != width:
            raise ValueError(
                f"hidden_TE of shape {tuple(self.hidden_TE.shape)}: expected [tokens, {width}] for this head"
            )

    def heads(self) -> list[OutputHead]:
        return [self.head]


@dataclass(frozen=True, eq=False)
class StudentHidden(Signal):
    """The exact signal of a teacher that has the student's head: its hidden states [T, D] after the last norm."""

    hidden_TD: Tensor

    def opened(self, student: OutputHead) -> AbstractContextManager[Signal]:
        return nullcontext(FullVocab(self.hidden_TD.detach(), detached(student)))


@dataclass(frozen=True, eq=False)
class RoutedSignal(Signal):
    """The signal of a teacher that scores only some rows.

    signal: a signal of T rows. It is opened only while this teacher's rows are computed, so that only one teacher's
        head at a time is in memory.
    index: the numbers of the rows that the teacher scores, int64. No row belongs to two teachers.
    """

    signal: Signal
    index: Tensor

    def rows(self, rows: RowIndex) -> Self:
        raise ValueError("the rows of a routed signal cannot be selected: expected one teacher for all tokens")


@dataclass(frozen=True, eq=False)
class DenseLogits(Signal):
    """The teacher's logits, for small models and tests."""

    logits_TV: Tensor

    def __post_init__(self) -> None:
        if self.logits_TV.dim() != 2:
            raise ValueError(f"logits_TV of shape {tuple(self.logits_TV.shape)}: expected [tokens, vocabulary]")


@dataclass(frozen=True, eq=False)
class Mixture(Signal):
    """The weighted mean of the distributions of several dense teachers, p = Σ_i w_i softmax(z_i / τ) for logits z_i.

    τ is the term's temperature. A pass stores p as one tile of logits τ·log p, whose softmax at τ is p. So terms
    treat a mixture like any other dense teacher. p is exact: every member is normalized over the vocabulary before
    the sum.

    signals: `FullVocab` or `DenseLogits` over the same tokens.
    weights: positive numbers. They are divided by their sum.
    temperature: τ, the temperature of the terms with this signal.
    """

    signals: Sequence[Signal]
    weights: Sequence[float]
    temperature: float = 1.0

    def __post_init__(self) -> None:
        # tuples, because a caller could change a list after these checks
        object.__setattr__(self, "signals", tuple(self.signals))
        object.__setattr__(self, "weights", tuple(self.weights))
        check_temperature(self.temperature)
        if not self.signals or len(self.signals) != len(self.weights):
            raise ValueError(
                f"a mixture of {len(self.signals)} signals with {len(self.weights)} weights: expected one signal or "
                "more, and one weight for each"
            )
        for at, signal in enumerate(self.signals):
            if not isinstance(signal, FullVocab | DenseLogits):
                advice = "which have every token's probability; use a separate term for another signal"
                if isinstance(signal, Mixture):
                    advice = "such as the signals of that mixture, with their weights times the mixture's"
                raise ValueError(
                    f"signals[{at}] is of type {type(signal).__name__}: expected FullVocab or DenseLogits, {advice}"
                )
            if signal.tokens != self.tokens:
                raise ValueError(
                    f"signals[{at}] has {signal.tokens} tokens, signals[0] {self.tokens}; expected one row per token "
                    "in both"
                )
        for at, weight in enumerate(self.weights):
            if isinstance(weight, bool) or not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"weights[{at}]={weight}: expected a positive number; leave out signals of weight 0")

    @property
    def log_weights(self) -> list[float]:
        """The logs of the weights w_i, whose sum is 1."""
        logs = [math.log(weight) for weight in self.weights]
        # in log space, so that neither the sum of the weights nor a quotient overflows or underflows
        largest = max(logs)
        total = largest + math.log(math.fsum(math.exp(log - largest) for log in logs))
        return [log - total for log in logs]

    def heads(self) -> list[OutputHead]:
        return [head for signal in self.signals for head in signal.heads()]


@dataclass(frozen=True, eq=False)
class SparseSignal(Signal):
    """K ids per token with the teacher's log-probabilities over the whole vocabulary.

    An id that is negative or beyond the vocabulary is an absent entry. If an id is repeated, its first entry counts.
    `tail_log_prob_T`: the log of the teacher's mass outside the ids. If it is None, the mass is 1 − Σp, but at least
    `TAIL_FLOOR`. In float32, 1 − Σp is zero or negative for a third of peaked rows, so pass the mass if it is known.
    `temperature`: the temperature of the log-probabilities. None means the term's temperature.
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
        check_per_token(self.tokens, tail_log_prob_T=self.tail_log_prob_T)


class TopK(SparseSignal):
    """The teacher's top K ids, for example from a server or a cache."""


class Chosen(SparseSignal):
    """Ids that the student chose, with the teacher's log-probabilities."""


@dataclass(frozen=True, eq=False)
class Sampled(Signal):
    """Sampled ids with importance weights, which give an unbiased estimate of the gradient of forward KL.

    Random sampling distillation (arXiv 2503.16870): ids are sampled from a proposal r, with weights in proportion to
    p/r. Σ_m weight·[id = v] estimates p_v, so the value estimates a cross-entropy: forward KL plus the teacher's
    entropy. An id that is negative or beyond the vocabulary is an absent entry. Every occurrence of an id counts.
    """

    ids_TM: Tensor
    weights_TM: Tensor

    def __post_init__(self) -> None:
        check_pairs("ids_TM", self.ids_TM, "weights_TM", self.weights_TM)


@dataclass(frozen=True, eq=False)
class SpanSignal(Signal):
    """Probabilities of spans of text, from a teacher with another tokenizer.

    Where student and teacher split a text into different tokens, a span is the text between two common token borders.
    It has student tokens y_0 … y_k, teacher tokens x_0 … x_l and the probability P = Π_j p(x_j) (GOLD's merged
    probability). The values of the span are

        row of y_0          the divergence from a distribution over the student's ids, in which P is given to y_0
        rows of y_1 … y_k   P · (−log q(y_j)), for every divergence (`Continuation`)

    If the divergence is forward KL, the sum of these values is the forward KL of the whole span (chain rule).

    first: the distribution at rows that predict the first token of a span.
    first_weights_T: 1 at rows that predict the first token of a span, 0 at other rows.
    continuation_weights_T: P at rows that predict a later token of a span, 0 at other rows.
    """

    first: TopK
    first_weights_T: Tensor
    continuation_weights_T: Tensor

    def __post_init__(self) -> None:
        check_per_token(
            self.first.tokens,
            first_weights_T=self.first_weights_T,
            continuation_weights_T=self.continuation_weights_T,
        )


def _rows_of(value: Any, rows: RowIndex) -> Any:
    """Return these rows of a tensor, of a signal or of a tuple of them; return any other field unchanged."""
    if isinstance(value, tuple):
        return tuple(_rows_of(element, rows) for element in value)
    if isinstance(value, Signal):
        return value.rows(rows)
    return value[rows] if isinstance(value, Tensor) else value


def check_temperature(temperature: float) -> None:
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature}: expected a positive number")


def check_per_token(tokens: int, **per_token: Tensor | None) -> None:
    """Require that each tensor has one number per token. None is skipped."""
    for name, values_T in per_token.items():
        if values_T is not None and values_T.shape != (tokens,):
            raise ValueError(f"{name} of shape {tuple(values_T.shape)}: expected ({tokens},), one number per token")


def check_pairs(ids_name: str, ids: Tensor, values_name: str, values: Tensor) -> None:
    if ids.dim() != 2 or ids.shape != values.shape or ids.shape[1] == 0:
        raise ValueError(
            f"{ids_name} of shape {tuple(ids.shape)} and {values_name} of shape {tuple(values.shape)}: "
            "expected the same two dims, [tokens, entries], with one entry or more"
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{ids_name} of dtype {ids.dtype}: expected int32 or int64")


def first_occurrence(ids_TK: Tensor, vocabulary: int) -> Tensor:
    """Return a mask [T, K] of the ids that are inside the vocabulary and do not occur earlier in their row."""
    order_TK = torch.argsort(ids_TK, dim=1, stable=True)
    sorted_TK = ids_TK.gather(1, order_TK)
    repeated_TK = torch.zeros_like(ids_TK, dtype=torch.bool)
    repeated_TK[:, 1:] = sorted_TK[:, 1:] == sorted_TK[:, :-1]
    repeated_TK = torch.zeros_like(repeated_TK).scatter(1, order_TK, repeated_TK)
    return (ids_TK >= 0) & (ids_TK < vocabulary) & ~repeated_TK


def teacher_tail(signal: SparseSignal, log_p_TK: Tensor, student_tail_T: Tensor) -> Tensor:
    """Return the log of the teacher's mass outside the ids, [T].

    A mass that is computed as 1 − Σp is at least `TAIL_FLOOR`, except that it is 0 where the student has no mass
    outside the ids (K = V).
    """
    if signal.tail_log_prob_T is not None:
        return signal.tail_log_prob_T.to(log_p_TK.dtype)
    computed_T = torch.log1p(-log_p_TK.exp().sum(1).clamp(max=1 - TAIL_FLOOR))
    return computed_T.masked_fill(student_tail_T == -math.inf, -math.inf)
