"""An output processor that gives a teacher's K likeliest ids and the token that actually comes next.

C rows of T tokens, E the teacher's width, V vocabulary, K ids per token.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.objective.stable import log_sum_exp
from stillhouse.signals.extract import ROWS
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
    top_k: int,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The K likeliest ids of each row and its label, their log-probabilities, and the log of the mass outside all.

    Returns ids and log_probs [C, K+1] and tail_log_prob [C]. The last entry is the label; its id is -1 and its
    log-probability -inf if it is among the K ids. Raises ValueError if the vocabulary has fewer ids.
    """
    if top_k > head.rows:
        raise ValueError(f"top_k={top_k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    ids = [torch.zeros(0, top_k + 1, dtype=torch.int32)]
    log_probs, tail = [torch.zeros(0, top_k + 1, dtype=dtype)], [torch.zeros(0)]
    for rows_CE, label_C in zip(hidden_CE.split(ROWS), labels_C.split(ROWS), strict=True):
        logits_CV = projection.logits(rows_CE) / temperature
        best_CK, ids_CK = logits_CV.topk(top_k)
        label_C1 = label_C.to(logits_CV.device)[:, None]
        is_known_C1 = (ids_CK == label_C1).any(1, keepdim=True)
        label_logit_C1 = logits_CV.gather(1, label_C1).masked_fill(is_known_C1, -math.inf)
        gap_CK = torch.cat([best_CK, label_logit_C1], 1) - best_CK[:, :1]
        outside_CV = logits_CV.scatter_(1, ids_CK, -math.inf).scatter_(1, label_C1, -math.inf)
        outside_C = outside_CV.sub_(best_CK[:, :1]).exp_().sum(1)
        log_mass_C = log_sum_exp(torch.ones_like(outside_C), gap_CK[:, 1:].exp().sum(1) + outside_C)
        ids.append(torch.cat([ids_CK, label_C1.masked_fill(is_known_C1, -1)], 1).int().cpu())
        log_probs.append((gap_CK - log_mass_C[:, None]).to(dtype).cpu())
        tail.append((outside_C.log() - log_mass_C).float().cpu())
    return {"ids": torch.cat(ids), "log_probs": torch.cat(log_probs), "tail_log_prob": torch.cat(tail)}
