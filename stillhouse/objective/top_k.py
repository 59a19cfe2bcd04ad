"""The top K tokens of each row, and the mass of all other tokens, over one rank's logits or over vocabulary shards.

A rank with fewer than K rows of the vocabulary pads its candidates: id −1, logit −∞.

C rows, V vocabulary of this rank, K ids per row, R ranks, N = R·K candidates of a row, X numbers of a row.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.objective.numerics import log_sum_exp
from stillhouse.objective.vocab import AsyncAllGather, VocabShard


@dataclass(frozen=True)
class TopKLogits:
    """The top K ids of each row, the argmax first.

    gap_CK: their logits minus the largest logit. largest_C: the largest logit.
    outside_C: the mass of all other ids, in units of the argmax's mass.
    """

    ids_CK: Tensor
    gap_CK: Tensor
    largest_C: Tensor
    outside_C: Tensor

    @property
    def log_mass_C(self) -> Tensor:
        """The log of the mass of all ids, in units of the argmax's mass."""
        return log_sum_exp(torch.ones_like(self.outside_C), self.gap_CK[:, 1:].exp().sum(1) + self.outside_C)

    @property
    def log_probs_CK(self) -> Tensor:
        return self.gap_CK - self.log_mass_C[:, None]

    @property
    def tail_log_prob_C(self) -> Tensor:
        """The log of the mass outside the ids, from a separate sum: 1 − Σp has no correct digit on peaked rows."""
        return self.outside_C.log() - self.log_mass_C


def top_k(logits_CV: Tensor, k: int, shard: VocabShard | None, inside_C1: Tensor | None = None) -> TopKLogits:
    """Return the top K ids and the mass outside them. Over several ranks, this is one all-gather.

    logits_CV: this rank's part of the logits, divided by the temperature; it is overwritten.
    inside_C1: one more id of each row; its mass is excluded from the mass outside. Not supported with shards.
    """
    best_CK, ids_CK = local_top_k(logits_CV, k, shard)
    if logits_CV.shape[1]:
        columns_CK = ids_CK[:, : logits_CV.shape[1]].long() - _first_id(shard)
        logits_CV.scatter_(1, columns_CK, -math.inf)
        if inside_C1 is not None:
            logits_CV.scatter_(1, inside_C1, -math.inf)
        rest_C1 = logits_CV.sub_(best_CK[:, :1]).exp_().sum(1, keepdim=True)
    else:  # −inf − (−inf) is NaN
        rest_C1 = torch.zeros_like(best_CK[:, :1])
    ranks_RCX = AsyncAllGather(torch.cat([best_CK, ids_CK, best_CK[:, :1], rest_C1], 1), shard).wait()
    logits_RCK, ids_RCK, largest_RC1, rest_RC1 = ranks_RCX.split([k, k, 1, 1], 2)
    best_CK, ids_CK, others_CN = merged_top_k(logits_RCK, ids_RCK, k)
    largest_C = best_CK[:, 0]
    outside_C = (others_CN - largest_C[:, None]).exp().sum(1)
    outside_C += (rest_RC1[..., 0] * (largest_RC1[..., 0] - largest_C).exp()).sum(0)
    return TopKLogits(ids_CK, best_CK - best_CK[:, :1], largest_C, outside_C)


def largest(values_CV: Tensor, k: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return the K largest values of each row over all ranks and their ids, in descending order, [C, K] each."""
    ranks_RCX = AsyncAllGather(torch.cat(local_top_k(values_CV, k, shard), 1), shard).wait()
    values_RCK, ids_RCK = ranks_RCX.chunk(2, 2)
    values_CK, ids_CK, _ = merged_top_k(values_RCK, ids_RCK, k)
    return values_CK, ids_CK


def local_top_k(values_CV: Tensor, k: int, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return this rank's K largest values and their ids, in the values' dtype, [C, K] each."""
    values_CK, columns_CK = values_CV.topk(min(k, values_CV.shape[1]), 1)
    missing = (0, k - values_CK.shape[1])
    # ids are exact in float32, because they are far below 2²⁴
    ids_CK = pad(columns_CK + _first_id(shard), missing, value=-1).to(values_CK.dtype)
    return pad(values_CK, missing, value=-math.inf), ids_CK


def merged_top_k(values_RCK: Tensor, ids_RCK: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the K largest of all ranks' candidates, their ids, and the candidates with −∞ in place of these K."""
    values_CN, ids_CN = (ranked_RCK.transpose(0, 1).flatten(1) for ranked_RCK in (values_RCK, ids_RCK))
    values_CK, places_CK = values_CN.topk(k, 1)
    return values_CK, ids_CN.gather(1, places_CK).long(), values_CN.scatter(1, places_CK, -math.inf)


def _first_id(shard: VocabShard | None) -> int:
    return 0 if shard is None else shard.start
