"""The tokens of a batch that the student's policy has sampled, and their log-probabilities for the terms.

    advantage_t += Σ_{u ≥ t} γ^(u−t) (log p_u − log q_old_u)        MiniLLM (arXiv:2306.08543), in the same document

p is the teacher's probability of a row's label; q_old is the probability with which the label was sampled. In a
packed batch, a row's label may also come from the dataset, or be absent; such rows are ignored here. T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from stillhouse.objective.head import OutputHead, common_vocabulary
from stillhouse.objective.metric_keys import IS_SAMPLED, OLD_LOG_PROBS
from stillhouse.objective.signals import Signal, check_per_token
from stillhouse.objective.teacher_log_probs import teacher_log_probs


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """per_token: the tensors of `metric_keys.py`, [T] each.
    document_T: the document of each row.
    valid_index: the rows that count; None: all rows.
    teacher_heads: the heads of all teachers of the batch. Probabilities are over the tokens that all heads have.
    """

    labels_T: Tensor
    per_token: Mapping[str, Tensor]
    document_T: Tensor | None = None
    valid_index: Tensor | None = None
    student: OutputHead | None = None
    teacher_heads: Sequence[OutputHead] = ()

    def __post_init__(self) -> None:
        check_per_token(len(self.labels_T), **{f"per_token[{name!r}]": one for name, one in self.per_token.items()})

    @property
    def weights_T(self) -> Tensor | None:
        """1 at sampled tokens, 0 elsewhere; None if `per_token` has no `IS_SAMPLED`."""
        return self.per_token.get(IS_SAMPLED)

    @property
    def others_T(self) -> Tensor | None:
        """1 − `weights_T`; None if `weights_T` is None."""
        return None if self.weights_T is None else 1 - self.weights_T

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

    def log_probs(self, signal: Signal, temperature: float) -> Tensor:
        """Return the teacher's log p of the sampled tokens, 0 elsewhere."""
        student = self.student
        return teacher_log_probs(
            signal,
            self.labels_T.masked_fill(~self.is_sampled_T, -1),
            temperature,
            vocabulary=None if student is None else common_vocabulary([student, *self.teacher_heads]),
            shard=None if student is None else student.shard,
            valid_index=self.valid_index,
        )

    def log_ratio(self, log_p_T: Tensor, discount: float) -> Tensor:
        """Return, for each sampled token, the discounted sum of log p − log q_old over it and later tokens, [T]."""
        ratio_T = (log_p_T - self.require(OLD_LOG_PROBS).to(log_p_T.dtype)).masked_fill(~self.is_sampled_T, 0.0)
        if not discount:
            return ratio_T
        if self.document_T is None:
            raise ValueError(f"discount={discount} without document_T: expected the document of each row")
        return discounted_sum(ratio_T, self.document_T, discount)


def discounted_sum(values_T: Tensor, document_T: Tensor, discount: float) -> Tensor:
    """Return Σ_{u ≥ t} discount^(u−t) · values_u over the rows u of t's document, for each row t.

    A document ends where the number in document_T changes. The sums are built by doubling: after step k, each row has
    the sum over its next 2^k rows. This takes log2(T) steps. A formula with quotients of powers would overflow.
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
