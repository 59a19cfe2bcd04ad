"""The tokens of a batch that the student's policy has sampled, their log-probabilities, and the origin of each row.

    advantage_t += Σ_{u ≥ t} γ^(u−t) (log p_u − log q_old_u)        MiniLLM (arXiv:2306.08543), in the same document
    ratio_t = exp(mean_u (log q_u − log q_old_u))                   GSPO (arXiv:2507.18071), over the document

For a row's label, p is the teacher's probability, q the student's present probability, and q_old the probability with
which the label was sampled. In a packed batch, a label can also come from the dataset or the teacher, or be absent;
the two sums ignore such rows. A label has one of three origins:

    dataset    a document of the dataset
    student    a completion that the student has generated
    teacher    a completion that the teacher has generated

T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from stillhouse.objective.fused_objective import linear_objective
from stillhouse.objective.head import OutputHead, common_vocabulary, detached
from stillhouse.objective.log_probs import teacher_log_probs
from stillhouse.objective.metrics import IS_SAMPLED, OLD_LOG_PROBS, POLICY_VERSION
from stillhouse.objective.row_temperatures import (
    RowTemperatures,
    Temperatures,
    distinct_temperatures,
    select_rows,
    term_options,
)
from stillhouse.objective.sampled_terms import LogProb
from stillhouse.objective.signals import Signal, check_per_token

DATASET, STUDENT, TEACHER = ORIGINS = ("dataset", "student", "teacher")


def origin_masks(labels_T: Tensor, per_token: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a mask of each origin's rows, [T] bool. Without tensors of rollouts, all rows are the dataset's."""
    if IS_SAMPLED not in per_token:
        none_T = torch.zeros_like(labels_T, dtype=torch.bool)
        return {DATASET: ~none_T, STUDENT: none_T, TEACHER: none_T}
    if POLICY_VERSION not in per_token:
        raise ValueError(
            f"{POLICY_VERSION} is missing in per_token (it has {', '.join(sorted(per_token))}): expected it with "
            f"{IS_SAMPLED}, to distinguish the teacher's completions from the dataset"
        )
    is_student_T = per_token[IS_SAMPLED] != 0
    is_teacher_T = ~is_student_T & (per_token[POLICY_VERSION] >= 0)
    return {DATASET: ~is_student_T & ~is_teacher_T, STUDENT: is_student_T, TEACHER: is_teacher_T}


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """A batch of labels, and the tensors from which the log-probabilities of its sampled tokens are computed.

    per_token: the tensors [T] with the keys of `metrics.py`.
    document_T: the number of each row's document.
    valid_index: the rows that count, or None for all rows.
    student: the student's head, or None where `ObjectiveSpec.terms` does not need it.
    teacher_heads: the heads of all teachers of the batch. Probabilities are over the tokens that all heads have.
    hidden_TD: the student's hidden states, for `sequence_ratios`.
    """

    labels_T: Tensor
    per_token: Mapping[str, Tensor]
    document_T: Tensor | None = None
    valid_index: Tensor | None = None
    student: OutputHead | None = None
    teacher_heads: Sequence[OutputHead] = ()
    hidden_TD: Tensor | None = None

    def __post_init__(self) -> None:
        named = {f"per_token[{name!r}]": values_T for name, values_T in self.per_token.items()}
        check_per_token(len(self.labels_T), **named)

    @property
    def weights_T(self) -> Tensor | None:
        """1 at sampled tokens, 0 elsewhere; None if `per_token` has no `IS_SAMPLED`."""
        return self.per_token.get(IS_SAMPLED)

    @cached_property
    def is_sampled_T(self) -> Tensor:
        """True where a row is in `valid_index` and has a label that the student has sampled."""
        is_sampled_T = (self.labels_T >= 0) & (self.require(IS_SAMPLED) != 0)
        if self.valid_index is None:
            return is_sampled_T
        index = self.valid_index.to(is_sampled_T.device)
        return torch.zeros_like(is_sampled_T).index_copy(0, index, is_sampled_T[index])

    def require(self, name: str) -> Tensor:
        """Return a tensor of `per_token`. Raises ValueError if it is missing."""
        if name not in self.per_token:
            raise ValueError(
                f"{name} is missing in per_token (it has {', '.join(sorted(self.per_token)) or 'nothing'}): "
                "sampled_kl and policy_gradient learn from tokens that the student has sampled; expected a batch of "
                "rollouts, or another loss"
            )
        return self.per_token[name]

    def at_sampled(self, name: str) -> Tensor:
        """Return a tensor of `per_token`, with 0 at rows without a sampled token."""
        return self.require(name).masked_fill(~self.is_sampled_T, 0.0)

    def log_probs(self, signals: Sequence[Signal], temperatures: Temperatures) -> Tensor:
        """Return a teacher's log p of the sampled tokens, [T], 0 at other rows. signals: one for each temperature."""
        student = self.student
        vocabulary = None if student is None else common_vocabulary([student, *self.teacher_heads])
        shard = None if student is None else student.shard
        labels_T = self.labels_T.masked_fill(~self.is_sampled_T, -1)
        by_temperature = [
            teacher_log_probs(
                signal, labels_T, temperature, vocabulary=vocabulary, shard=shard, valid_index=self.valid_index
            )
            for signal, temperature in zip(signals, distinct_temperatures(temperatures), strict=True)
        ]
        number_T = temperatures.number_T if isinstance(temperatures, RowTemperatures) else None
        return select_rows(by_temperature, number_T)

    def log_ratio(self, log_p_T: Tensor, discount: float) -> Tensor:
        """Return each sampled token's discounted sum of log p − log q_old over itself and the later tokens, [T]."""
        ratio_T = (log_p_T - self.require(OLD_LOG_PROBS).to(log_p_T.dtype)).masked_fill(~self.is_sampled_T, 0.0)
        if not discount:
            return ratio_T
        if self.document_T is None:
            raise ValueError(f"discount={discount} without document_T: expected each row's document")
        return discounted_sum(ratio_T, self.document_T, discount)

    @torch.no_grad()
    def sequence_ratios(self, temperatures: Temperatures) -> Tensor:
        """Return the ratio of each row's sequence (the function `sequence_ratios`), over its sampled tokens, [T].

        This projects the student's hidden states once more. Over a sharded head, each chunk needs one all-gather.
        """
        if self.hidden_TD is None or self.student is None or self.document_T is None:
            raise ValueError(
                "ratio=sequence: expected the student's hidden states and head and the document of each row, because "
                "the ratio of a sequence needs all of its tokens"
            )
        head = replace(detached(self.student), vocab_size=common_vocabulary([self.student, *self.teacher_heads]))
        output = linear_objective(
            self.hidden_TD.detach(),
            head,
            [LogProb(self.labels_T.masked_fill(~self.is_sampled_T, -1), **term_options(temperatures))],
            weights_T=self.is_sampled_T.to(self.hidden_TD.dtype),
            valid_index=self.valid_index,
        )
        log_ratio_T = output.per_token["log_prob"] - self.at_sampled(OLD_LOG_PROBS)
        return sequence_ratios(log_ratio_T, self.document_T, self.is_sampled_T)


def sequence_ratios(log_ratio_T: Tensor, document_T: Tensor, is_counted_T: Tensor) -> Tensor:
    """Return, at each row, the geometric mean of q(y) / q_old(y) over the counted rows of the row's document, [T].

    The mean is 1 if the document has no counted rows. log_ratio_T: log q(y) − log q_old(y). A document ends where the
    number in document_T changes. (Zheng et al. 2025, arXiv:2507.18071, eq. 7)
    """
    log_ratio_T = log_ratio_T.masked_fill(~is_counted_T, 0.0)
    # with discount 1, a document's first row gets the sum over the document, and the order of additions is fixed
    sums_T = discounted_sum(log_ratio_T, document_T, 1.0)
    counts_T = discounted_sum(is_counted_T.to(sums_T.dtype), document_T, 1.0)
    is_first_T = torch.ones_like(is_counted_T)
    is_first_T[1:] = document_T[1:] != document_T[:-1]
    rows_T = torch.arange(len(document_T), device=document_T.device)
    first_T = torch.where(is_first_T, rows_T, 0).cummax(0).values
    return (sums_T / counts_T.clamp_min(1.0))[first_T].exp()


def discounted_sum(values_T: Tensor, document_T: Tensor, discount: float) -> Tensor:
    """Return Σ_{u ≥ t} discount^(u−t) · values_u over the rows u of t's document, for each row t.

    A document ends where the number in document_T changes. The sums are built by doubling: after step k, each row has
    the sum over 2^k rows, beginning with itself. A formula with quotients of powers of the discount would overflow.

    Raises ValueError for tensors of different shapes and for a discount outside 0 … 1.
    """
    if document_T.shape != values_T.shape or values_T.dim() != 1:
        raise ValueError(
            f"values_T of shape {tuple(values_T.shape)}, document_T of shape {tuple(document_T.shape)}: expected one "
            "number per row in both"
        )
    if isinstance(discount, bool) or not 0 <= discount <= 1:
        raise ValueError(f"discount={discount}: expected a number from 0 to 1")
    tokens = len(values_T)
    border_T = torch.zeros_like(document_T)
    border_T[1:] = document_T[1:] != document_T[:-1]
    piece_T = border_T.cumsum(0)
    sums_T, distance, factor = values_T, 1, float(discount)
    while distance < tokens and factor:
        is_same = piece_T[distance:] == piece_T[:-distance]
        later_T = torch.zeros_like(sums_T)
        later_T[:-distance] = torch.where(is_same, factor * sums_T[distance:], 0.0)
        sums_T, distance, factor = sums_T + later_T, 2 * distance, factor * factor
    return sums_T
