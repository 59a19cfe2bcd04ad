"""An output processor that gives a teacher's K likeliest ids and the token that actually comes next.

C rows of T tokens, E the teacher's width, V vocabulary, K ids per token.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.objective.top_k import top_k
from stillhouse.signals.extract import ROWS, joined, no_rows, stored_tensors
from stillhouse.signals.signal_spec import DTYPES, SignalSpec


class LabelledRows(NamedTuple):
    """The context of `ExtractLabelled`, int64. index_C: the rows. labels_C: the token that follows each of them."""

    index_C: Tensor
    labels_C: Tensor


@dataclass(frozen=True)
class ExtractLabelled:
    """Gives the tensors of `SignalSpec.tensors` for "top_k" with a label on the CPU."""

    spec: SignalSpec

    @torch.no_grad()
    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: LabelledRows, depth: int = 0
    ) -> dict[str, Tensor]:
        assert self.spec.top_k is not None
        assert self.spec.temperature is not None
        hidden_CE = hidden_states.flatten(0, -2)[context.index_C]
        dtype = DTYPES[self.spec.dtype]
        return labelled_log_probs(hidden_CE, head, context.labels_C, self.spec.top_k, self.spec.temperature, dtype)


def labelled_log_probs(
    hidden_CE: Tensor,
    head: OutputHead,
    labels_C: Tensor,
    k: int,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The K likeliest ids of each row and its label, their log-probabilities, and the log of the mass outside all.

    Returns ids and log_probs [C, K+1] and tail_log_prob [C]. The last entry is the label; its id is -1 and its
    log-probability -inf if it is among the K ids. Raises ValueError if the vocabulary has fewer ids.
    """
    if k > head.rows:
        raise ValueError(f"top_k={k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    parts = []
    for rows_CE, label_C in zip(hidden_CE.split(ROWS), labels_C.split(ROWS), strict=True):
        logits_CV = projection.logits(rows_CE) / temperature
        label_C1 = label_C.to(logits_CV.device)[:, None]
        label_logit_C1 = logits_CV.gather(1, label_C1)
        best = top_k(logits_CV, k, None, inside_C1=label_C1)
        is_known_C1 = (best.ids_CK == label_C1).any(1, keepdim=True)
        label_gap_C1 = (label_logit_C1 - best.largest_C[:, None]).masked_fill(is_known_C1, -math.inf)
        ids_CK = torch.cat([best.ids_CK, label_C1.masked_fill(is_known_C1, -1)], 1)
        both = replace(best, ids_CK=ids_CK, gap_CK=torch.cat([best.gap_CK, label_gap_C1], 1))
        parts.append(stored_tensors(both.ids_CK, both.log_probs_CK, both.tail_log_prob_C, dtype))
    return joined(parts, no_rows(k + 1, dtype))
