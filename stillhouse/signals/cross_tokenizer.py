"""Translates the signals of a teacher with another tokenizer approximately to the student's tokens.

The teacher reads the same text in its own tokens. A `LocalModelStore` gives the teacher's top-k ids and the
log-probability of each token of the text. This module converts them to a `SpanSignal` for the student's rows. The
signal has GOLD's merged probabilities as top-k probabilities of the student's ids.

A span is a piece of text between two positions at which both tokenizers have a token border (`alignment.py`). Let
y_0 … y_k be the span's student tokens, and x_0 … x_l its teacher tokens. At the row that predicts y_0, the teacher
distinguishes these disjoint events. The probability of each event is given to a student token:

    event                              student token, probability
    x_0, followed by x_1 … x_l         y_0; P = Π_j p(x_j)
    x_0, followed by other tokens      the student's token for the bytes of x_0; p(x_0) − P
    another top-k id x                 the student's token for the bytes of x; p(x)
    an id outside the top-k            the tail

The student's token for some bytes is the token with exactly these bytes. If there is no such token, the student's
tokenizer tokenizes the bytes as the middle of a text, and the first token is used. Where the student's tokenizer puts
a space before a text, the first token includes this space (▁the). If the bytes are not complete characters and no
token has them, their probability is added to the tail. Probabilities of the same token are added, so the
probabilities of all outcomes sum to 1.

N rows of a document, R rows of the teacher, K ids of the teacher per row, B = K + 2 outcomes (K ids, y_0, x_0),
S spans.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents, tokenizer_fingerprint
from stillhouse.data.media import MediaInputs
from stillhouse.data.render.alignment import ABSENT, AlignedSpan, Aligner
from stillhouse.objective import SpanSignal, TopK
from stillhouse.objective.signals import Tail
from stillhouse.signals.scorer import LocalModelStore
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec, TensorForms
from stillhouse.signals.signal_store import SignalStore


@dataclass(frozen=True)
class AlignedSpec(SignalSpec):
    """The signal for every row of the student, from a teacher that gives top_k = K ids. Its tensors are:

    ids            [N, B] int32       the student's ids; -1 is an absent entry
    log_probs      [N, B] float32     the log-probabilities of these ids
    tail_log_prob  [N] float32        the log of the remaining mass
    weight         [N] float32        1 at rows that predict the first token of a span, else 0
    continuation   [N] float32        P at rows that predict a later token of a span, else 0
    """

    def tensors(self, width: int) -> TensorForms:
        entries = self.entries + 2
        return {
            "log_probs": ((entries,), torch.float32),
            "tail_log_prob": ((), torch.float32),
            "weight": ((), torch.float32),
            "ids": ((entries,), torch.int32),
            "continuation": ((), torch.float32),
        }

    def as_signal(self, tensors: dict[str, Tensor], tail: Tail) -> SpanSignal:
        first = TopK(tensors["ids"], tensors["log_probs"], tail, tensors["tail_log_prob"], self.temperature)
        return SpanSignal(first, tensors["weight"], tensors["continuation"])

    def __str__(self) -> str:
        return (
            "merged probabilities of spans of text (teacher.cross_tokenizer=gold: an approximation, from the top "
            f"{self.top_k} log-probabilities at temperature {self.temperature:g})"
        )


class CrossTokenizerStore(SignalStore):
    """Signals for the student's documents, made from the teacher's signals for the same texts.

    inner: the teacher's store; its signal must be "top_k" with a label
    Raises ValueError for a tokenizer whose tokens have no exact bytes.
    """

    signal: AlignedSpec

    def __init__(self, inner: LocalModelStore, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase):
        spec = inner.signal
        assert spec.with_label
        self.inner, self.aligner = inner, Aligner(student, teacher)
        self.signal = AlignedSpec("top_k", "float32", spec.top_k, spec.temperature)
        self.name = inner.name
        teacher_tokenizer = tokenizer_fingerprint(teacher)
        self.identity = hashlib.sha256(f"{inner.identity} {teacher_tokenizer}".encode()).hexdigest()
        if tokenizer_fingerprint(student) == teacher_tokenizer:
            self.warnings = [
                "student and teacher have the same tokenizer: the exact divergence needs no teacher.cross_tokenizer"
            ]

    def start(self, device: torch.device) -> None:
        self.inner.start(device)

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Raise ValueError for a document that cannot be aligned, or that the inner store refuses."""
        self.inner.require(self.aligner.translate(documents), what)

    def read(self, wanted: Sequence[DocumentRows]) -> list[dict[str, Tensor]]:
        aligned = self.aligner.align([request.tokens for request in wanted])
        forms = self.signal.tensors(0).items()
        signals = [
            {name: torch.zeros(len(request.rows), *shape, dtype=dtype) for name, (shape, dtype) in forms}
            for request in wanted
        ]
        # the spans with a token that a requested row predicts, except a span with the document's first token
        spans = [
            [
                span
                for span in document.spans
                if span.student.stop - 1 > request.rows.start
                and span.student.start - 1 < request.rows.stop
                and span.student.start > 0
                and span.teacher.start > 0
            ]
            for request, document in zip(wanted, aligned, strict=True)
        ]
        numbers = [number for number, spans_of_document in enumerate(spans) if spans_of_document]
        requests = []
        for number in numbers:  # the teacher's rows that predict the tokens of the spans
            rows = range(spans[number][0].teacher.start - 1, spans[number][-1].teacher.stop - 1)
            requests.append(DocumentRows(aligned[number].teacher_tokens, rows))
        teacher_signals = self.inner.read(requests) if requests else []
        for number, request, tensors in zip(numbers, requests, teacher_signals, strict=True):
            teacher = _TeacherRows.of(tensors, request)
            self._merge(signals[number], wanted[number], spans[number], teacher, aligned[number].begins)
        return signals

    def _merge(
        self,
        into: dict[str, Tensor],
        wanted: DocumentRows,
        spans: Sequence[AlignedSpan],
        teacher: "_TeacherRows",
        begins: frozenset[int],
    ) -> None:
        starts_S = torch.tensor([span.student.start - 1 for span in spans]) - wanted.rows.start
        stops_S = torch.tensor([span.student.stop - 1 for span in spans]) - wanted.rows.start
        tokens_S = torch.from_numpy(wanted.tokens[[span.student.start for span in spans]].astype(np.int64))
        teacher_starts_S = torch.tensor([span.teacher.start - 1 for span in spans]) - teacher.rows.start
        teacher_stops_S = torch.tensor([span.teacher.stop - 1 for span in spans]) - teacher.rows.start
        owner_N, row_N = _places(teacher_starts_S, teacher_stops_S)
        log_p_S = torch.zeros(len(spans), dtype=torch.float64).index_add_(0, owner_N, teacher.log_labels_R[row_N])
        begins_S = torch.tensor([span.student.start in begins for span in spans])
        ids_SB, log_probs_SB, tail_S = self._outcomes(teacher, teacher_starts_S, tokens_S, log_p_S, begins_S)
        is_inside_S = (starts_S >= 0) & (starts_S < len(wanted.rows))
        places = starts_S[is_inside_S]
        into["ids"][places] = ids_SB[is_inside_S].int()
        into["log_probs"][places] = log_probs_SB[is_inside_S].float()
        into["tail_log_prob"][places] = tail_S[is_inside_S].float()
        into["weight"][places] = 1.0
        later_S = (starts_S + 1).clamp(min=0)
        owner_N, place_N = _places(later_S, torch.maximum(stops_S.clamp(max=len(wanted.rows)), later_S))
        into["continuation"][place_N] = log_p_S[owner_N].exp().float()

    def _outcomes(
        self, teacher: "_TeacherRows", starts_S: Tensor, first_S: Tensor, log_p_S: Tensor, begins_S: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the student's ids, their log-probabilities and the tail's log-probability of each span, in float64.

        starts_S: the teacher's row that predicts x_0. first_S, log_p_S: y_0 and log P
        begins_S: whether the student's tokenizer puts a space before y_0
        """
        x_0_S, log_x_0_S = teacher.labels_R[starts_S], teacher.log_labels_R[starts_S]
        ids_SK, log_p_SK = teacher.ids_RK[starts_S], teacher.log_probs_RK[starts_S]
        log_p_SK = log_p_SK.masked_fill((ids_SK < 0) | (ids_SK == x_0_S[:, None]), -math.inf)
        # the event "x_0, followed by other tokens": log(p(x_0) − P) = log p(x_0) + log(1 − P / p(x_0))
        log_later_S = (log_p_S - log_x_0_S).masked_fill(log_p_S == -math.inf, -math.inf)
        near_S = torch.log(-torch.expm1(log_later_S.clamp(max=0.0)))
        far_S = torch.log1p(-log_later_S.exp().clamp(max=1.0))
        log_rest_S = log_x_0_S + torch.where(log_later_S > -math.log(2), near_S, far_S)
        # the student's token for the bytes of each teacher id; -1 if there is no token, or no teacher id
        first_of = torch.from_numpy(np.stack([self.aligner.first_of, self.aligner.first_of_text])).long()
        ids_SB = torch.cat([ids_SK, x_0_S[:, None]], 1)
        is_unknown_SB = (ids_SB < 0) | (ids_SB >= first_of.shape[1])
        student_SB = first_of[begins_S.long()[:, None], ids_SB.masked_fill(is_unknown_SB, 0)]
        student_SB = student_SB.masked_fill(is_unknown_SB, ABSENT)
        log_p_SB = torch.cat([log_p_SK, log_rest_S[:, None]], 1)
        is_y_0_SB = student_SB == first_S[:, None]
        log_y_0_S = torch.cat([log_p_S[:, None], log_p_SB.masked_fill(~is_y_0_SB, -math.inf)], 1).logsumexp(1)
        is_outcome_SB = (student_SB >= 0) & ~is_y_0_SB & (log_p_SB > -math.inf)
        in_tail_SB = log_p_SB.masked_fill(student_SB >= 0, -math.inf)
        tail_S = torch.cat([teacher.tail_R[starts_S][:, None], in_tail_SB], 1).logsumexp(1)
        student_SB, log_p_SB = _summed_by_id(
            student_SB.masked_fill(~is_outcome_SB, ABSENT), log_p_SB.masked_fill(~is_outcome_SB, -math.inf)
        )
        ids_SB = torch.cat([first_S[:, None], student_SB], 1)
        return ids_SB, torch.cat([log_y_0_S[:, None], log_p_SB], 1), tail_S


@dataclass(frozen=True)
class _TeacherRows:
    """The teacher's signal at some rows of a document, in float64. labels_R: the token that each row predicts"""

    rows: range
    ids_RK: Tensor
    log_probs_RK: Tensor
    tail_R: Tensor
    labels_R: Tensor
    log_labels_R: Tensor

    @classmethod
    def of(cls, tensors: dict[str, Tensor], document: DocumentRows) -> "_TeacherRows":
        """Convert the tensors of "top_k" with a label for these rows of the teacher's document."""
        rows = document.rows
        labels_R = torch.from_numpy(document.tokens[rows.start + 1 : rows.stop + 1].astype(np.int64))
        ids_RB, log_probs_RB = tensors["ids"].long(), tensors["log_probs"].double()
        # the last entry is the label; if the label is among the K ids, the last entry is absent
        is_label_RB = ids_RB == labels_R[:, None]
        assert bool(is_label_RB.any(1).all())
        log_labels_R = log_probs_RB.masked_fill(~is_label_RB, -math.inf).amax(1)
        ids_RK, log_probs_RK = ids_RB[:, :-1], log_probs_RB[:, :-1]
        return cls(rows, ids_RK, log_probs_RK, tensors["tail_log_prob"].double(), labels_R, log_labels_R)


def _summed_by_id(ids_SB: Tensor, log_p_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the probabilities of equal ids in each row. Ids are sorted in descending order; repeated ids become -1."""
    ids_SB, order_SB = ids_SB.sort(1, descending=True)
    log_p_SB = log_p_SB.gather(1, order_SB)
    is_new_SB = torch.ones_like(ids_SB, dtype=torch.bool)
    is_new_SB[:, 1:] = ids_SB[:, 1:] != ids_SB[:, :-1]
    largest_S1 = log_p_SB.amax(1, keepdim=True).clamp(min=torch.finfo(log_p_SB.dtype).min)
    mass_SB = torch.zeros_like(log_p_SB).scatter_add_(1, is_new_SB.cumsum(1) - 1, (log_p_SB - largest_S1).exp())
    first_SB = mass_SB.gather(1, is_new_SB.cumsum(1) - 1).log() + largest_S1
    is_outcome_SB = is_new_SB & (ids_SB >= 0)
    return ids_SB.masked_fill(~is_outcome_SB, ABSENT), first_SB.masked_fill(~is_outcome_SB, -math.inf)


def _places(starts_S: Tensor, stops_S: Tensor) -> tuple[Tensor, Tensor]:
    """List the N integers of S ranges. Return the number of each integer's range [N], and the integers [N]."""
    lengths_S = stops_S - starts_S
    owner_N = torch.repeat_interleave(torch.arange(len(lengths_S)), lengths_S)
    before_S = lengths_S.cumsum(0) - lengths_S
    return owner_N, torch.arange(len(owner_N)) - before_S[owner_N] + starts_S[owner_N]
