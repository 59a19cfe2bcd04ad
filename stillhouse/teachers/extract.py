"""An output processor that turns a teacher's hidden states into the tensors of a stored signal.

C rows of T tokens, E the teacher's width, V vocabulary, K ids per token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.objective.stable import log_sum_exp
from stillhouse.teachers.spec import DTYPES, SignalSpec

#: rows whose logits are in memory at a time
ROWS = 256


@dataclass(frozen=True)
class Extract:
    """Gives the tensors of `SignalSpec.tensors` on the CPU; the context is the index of the rows, [C] int64."""

    spec: SignalSpec

    @torch.no_grad()
    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Tensor, depth: int = 0
    ) -> dict[str, Tensor]:
        hidden_CE = hidden_states.flatten(0, -2)[context]
        if self.spec.kind == "hidden":
            return {"hidden": hidden_CE.to(DTYPES[self.spec.dtype]).cpu()}
        assert self.spec.top_k is not None
        assert self.spec.temperature is not None
        return top_k_log_probs(hidden_CE, head, self.spec.top_k, self.spec.temperature, DTYPES[self.spec.dtype])


def top_k_log_probs(
    hidden_CE: Tensor, head: OutputHead, top_k: int, temperature: float, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The K likeliest ids of each row, their log-probabilities and the log of the mass outside them.

    All are computed from the logits of the whole vocabulary, in float32. The mass outside is a sum of its own: 1 − Σp
    has no correct digit where the ids have nearly all of the mass. Raises ValueError if the vocabulary has fewer ids.
    """
    if top_k > head.rows:
        raise ValueError(f"top_k={top_k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    parts: dict[str, list[Tensor]] = {"ids": [], "log_probs": [], "tail_log_prob": []}
    for rows_CE in hidden_CE.split(ROWS):
        logits_CV = projection.logits(rows_CE) / temperature
        best_CK, ids_CK = logits_CV.topk(top_k)
        gap_CK = best_CK - best_CK[:, :1]
        outside_C = logits_CV.scatter_(1, ids_CK, -math.inf).sub_(best_CK[:, :1]).exp_().sum(1)
        log_mass_C = log_sum_exp(torch.ones_like(outside_C), gap_CK[:, 1:].exp().sum(1) + outside_C)
        parts["ids"].append(ids_CK.int().cpu())
        parts["log_probs"].append((gap_CK - log_mass_C[:, None]).to(dtype).cpu())
        parts["tail_log_prob"].append((outside_C.log() - log_mass_C).float().cpu())
    empty = {
        "ids": torch.zeros(0, top_k, dtype=torch.int32),
        "log_probs": torch.zeros(0, top_k, dtype=dtype),
        "tail_log_prob": torch.zeros(0),
    }
    return {name: torch.cat([empty[name], *each]) for name, each in parts.items()}
