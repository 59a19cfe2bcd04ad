"""An output processor that turns a teacher's hidden states into the tensors of a stored signal.

All log-probabilities are computed from the logits of the whole vocabulary, in float32 at least. The mass outside of
the ids is a sum of its own: 1 − Σp has no correct digit where the ids have nearly all of the mass. If the vocabulary
is sharded over ranks (tensor parallelism), each rank computes a few numbers per row from its own part of the
vocabulary, one all-gather gives them to all ranks, and every rank has the same result.

C rows of T tokens, E the teacher's width, V vocabulary (this rank's part of it), K ids per token, R ranks over which
the vocabulary is sharded, S values per row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.objective.signals import first_occurrence
from stillhouse.objective.stable import log_sum_exp
from stillhouse.objective.vocab import AsyncAllGather
from stillhouse.signals.signal_spec import DTYPES, SignalSpec

#: rows whose logits are in memory at a time
ROWS = 256


class ChosenRows(NamedTuple):
    """The context of `Extract` for "chosen". index_C: int64. ids_CK: the ids of each of these rows."""

    index_C: Tensor
    ids_CK: Tensor


@dataclass(frozen=True)
class Extract:
    """Gives the tensors of `SignalSpec.tensors` on the CPU.

    The context is the index of the rows, [C] int64; for "chosen", it is `ChosenRows`. Under tensor parallelism, all
    ranks have the same rows and get the same tensors. Raises ValueError for a signal that cannot be computed here.
    """

    spec: SignalSpec

    @torch.no_grad()
    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: Tensor | ChosenRows, depth: int = 0
    ) -> dict[str, Tensor]:
        spec, dtype = self.spec, DTYPES[self.spec.dtype]
        index_C = context.index_C if isinstance(context, ChosenRows) else context
        hidden_CE = hidden_states.flatten(0, -2)[index_C]
        if spec.kind == "hidden":
            return {"hidden": hidden_CE.to(dtype).cpu()}
        assert spec.top_k is not None
        assert spec.temperature is not None
        if spec.kind == "top_k":
            return top_k_log_probs(hidden_CE, head, spec.top_k, spec.temperature, dtype)
        if spec.kind == "chosen":
            assert isinstance(context, ChosenRows)
            return chosen_log_probs(hidden_CE, head, context.ids_CK, spec.temperature, dtype)
        raise ValueError(f"signal '{spec.kind}' cannot be computed here: expected hidden, top_k or chosen")


def top_k_log_probs(
    hidden_CE: Tensor, head: OutputHead, top_k: int, temperature: float, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The K likeliest ids of each row, their log-probabilities and the log of the mass outside them.

    Raises ValueError if the vocabulary has fewer ids.
    """
    if top_k > head.rows:
        raise ValueError(f"top_k={top_k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    parts: list[dict[str, Tensor]] = []
    for _, logits_CV in _logits(hidden_CE, head, temperature):
        best = _Best.of(logits_CV, head, top_k)
        log_mass_C = log_sum_exp(torch.ones_like(best.outside_C), best.gap_CK[:, 1:].exp().sum(1) + best.outside_C)
        parts.append(
            {
                "ids": best.ids_CK.int().cpu(),
                "log_probs": (best.gap_CK - log_mass_C[:, None]).to(dtype).cpu(),
                "tail_log_prob": (best.outside_C.log() - log_mass_C).float().cpu(),
            }
        )
    return _joined(parts, _empty(top_k, dtype))


def chosen_log_probs(
    hidden_CE: Tensor, head: OutputHead, ids_CK: Tensor, temperature: float, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The log-probabilities of given ids, and the log of the mass outside them.

    An id that is negative, or that repeats an earlier one of its row, is an absent entry: it gets −inf. Raises
    ValueError for an id beyond the vocabulary.
    """
    if ids_CK.numel() and int(ids_CK.max()) >= head.rows:
        raise ValueError(
            f"id {int(ids_CK.max())} of a teacher with a vocabulary of {head.rows}: expected a smaller id"
        )
    parts: list[dict[str, Tensor]] = []
    for rows, logits_CV in _logits(hidden_CE, head, temperature):
        chunk_CK = ids_CK[rows].to(logits_CV.device)
        values_CK, largest_C, outside_C = _chosen_of_all_ranks(logits_CV, chunk_CK, head)
        gap_CK = values_CK - largest_C[:, None]
        is_largest_CK = gap_CK == 0
        others_C = gap_CK.exp().masked_fill(is_largest_CK, 0.0).sum(1) + outside_C
        log_mass_C = log_sum_exp(is_largest_CK.sum(1).to(others_C.dtype), others_C)
        parts.append(
            {
                "ids": chunk_CK.int().cpu(),
                "log_probs": (gap_CK - log_mass_C[:, None]).to(dtype).cpu(),
                "tail_log_prob": (outside_C.log() - log_mass_C).float().cpu(),
            }
        )
    return _joined(parts, _empty(ids_CK.shape[1], dtype))


def ranked_log_probs(hidden_CE: Tensor, head: OutputHead, labels_C: Tensor, top_k: int) -> dict[str, Tensor]:
    """The log-probability and the rank of one id per row, and the K likeliest ids, as `prompt_logprobs` needs them.

    Temperature 1. Returns log_prob [C], rank [C] int64 (1 is the likeliest id; ids with equal logits count), ids
    [C, K] and log_probs [C, K]; top_k may be 0. Raises ValueError if the vocabulary has fewer than K ids.
    """
    if not 0 <= top_k <= head.rows:
        raise ValueError(f"top_k={top_k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    parts: list[dict[str, Tensor]] = []
    for rows, logits_CV in _logits(hidden_CE, head, 1.0):
        label_C1 = labels_C[rows].to(logits_CV.device)[:, None]
        value_C1 = _gathered(_values(logits_CV, label_C1, head), head).amax(0)
        above_C = _gathered((logits_CV >= value_C1).sum(1, keepdim=True).to(logits_CV.dtype), head).sum(0)[:, 0]
        best = _Best.of(logits_CV, head, max(top_k, 1))
        log_mass_C = log_sum_exp(torch.ones_like(best.outside_C), best.gap_CK[:, 1:].exp().sum(1) + best.outside_C)
        parts.append(
            {
                "log_prob": (value_C1[:, 0] - best.largest_C - log_mass_C).float().cpu(),
                "rank": above_C.long().cpu(),
                "ids": best.ids_CK[:, :top_k].int().cpu(),
                "log_probs": (best.gap_CK - log_mass_C[:, None])[:, :top_k].float().cpu(),
            }
        )
    empty = {"log_prob": torch.zeros(0), "rank": torch.zeros(0, dtype=torch.int64)}
    empty |= {"ids": torch.zeros(0, top_k, dtype=torch.int32), "log_probs": torch.zeros(0, top_k)}
    return _joined(parts, empty)


@dataclass(frozen=True)
class _Best:
    """The likeliest ids over all ranks. gap_CK: their logits less the largest one, which is the first.

    outside_C: the mass of all other ids, in units of the likeliest id's mass.
    """

    ids_CK: Tensor
    gap_CK: Tensor
    largest_C: Tensor
    outside_C: Tensor

    @classmethod
    def of(cls, logits_CV: Tensor, head: OutputHead, top_k: int) -> "_Best":
        """logits_CV: this rank's part of the logits; it is overwritten."""
        start = 0 if head.shard is None else head.shard.start
        held = min(top_k, logits_CV.shape[1])
        best_CK, ids_CK = logits_CV.topk(held)
        largest_C1 = best_CK[:, :1] if held else logits_CV.new_full((len(logits_CV), 1), -math.inf)
        logits_CV.scatter_(1, ids_CK, -math.inf)
        # a rank without rows of the vocabulary has no largest logit: −inf less −inf is no number
        rest_C1 = logits_CV.sub_(largest_C1).exp_().sum(1, keepdim=True) if held else torch.zeros_like(largest_C1)
        missing = (0, top_k - held)
        own_CS = torch.cat(
            [
                pad(best_CK, missing, value=-math.inf),
                # exact: an id is far below 2²⁴, the first integer that float32 cannot hold
                pad(ids_CK + start, missing).to(best_CK.dtype),
                largest_C1,
                rest_C1,
            ],
            1,
        )
        all_RCS = _gathered(own_CS, head)
        values_CS, ids_CS = (part.transpose(0, 1).flatten(1) for part in all_RCS[..., :-2].chunk(2, 2))
        best_CK, columns_CK = values_CS.topk(top_k)
        largest_C = best_CK[:, 0]
        # the candidates of the other ranks that are not among the K likeliest of all are outside of them, too
        unused_CS = values_CS.scatter(1, columns_CK, -math.inf)
        outside_C = (unused_CS - largest_C[:, None]).exp().sum(1)
        outside_C += (all_RCS[..., -1] * (all_RCS[..., -2] - largest_C).exp()).sum(0)
        return cls(ids_CS.gather(1, columns_CK), best_CK - best_CK[:, :1], largest_C, outside_C)


def _chosen_of_all_ranks(logits_CV: Tensor, ids_CK: Tensor, head: OutputHead) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of given ids (−inf for absent entries), the largest logit, and the mass outside in units of it.

    logits_CV is overwritten.
    """
    present_CK = first_occurrence(ids_CK, head.rows)
    values_CK = _values(logits_CV, ids_CK.masked_fill(~present_CK, -1), head)
    start, held = (0 if head.shard is None else head.shard.start), logits_CV.shape[1]
    if held:
        largest_C1 = logits_CV.amax(1, keepdim=True)
        columns_CK = ids_CK.long() - start
        # the ids of other ranks and absent entries are sent to a column of their own, which is dropped
        columns_CK = columns_CK.masked_fill(~present_CK | (columns_CK < 0) | (columns_CK >= held), held)
        is_chosen_CV = torch.zeros(len(logits_CV), held + 1, dtype=torch.bool, device=logits_CV.device)
        is_chosen_CV = is_chosen_CV.scatter_(1, columns_CK, True)[:, :held]
        rest_C1 = logits_CV.masked_fill_(is_chosen_CV, -math.inf).sub_(largest_C1).exp_().sum(1, keepdim=True)
    else:
        largest_C1 = logits_CV.new_full((len(logits_CV), 1), -math.inf)
        rest_C1 = torch.zeros_like(largest_C1)
    all_RCS = _gathered(torch.cat([values_CK, largest_C1, rest_C1], 1), head)
    largest_C = all_RCS[..., -2].amax(0)
    outside_C = (all_RCS[..., -1] * (all_RCS[..., -2] - largest_C).exp()).sum(0)
    return all_RCS[..., :-2].amax(0), largest_C, outside_C


def _values(logits_CV: Tensor, ids_CK: Tensor, head: OutputHead) -> Tensor:
    """The logits of given ids, as far as this rank has them; −inf for all others. [C, K]"""
    start, held = (0 if head.shard is None else head.shard.start), logits_CV.shape[1]
    columns_CK = ids_CK.long() - start
    is_held_CK = (ids_CK >= 0) & (columns_CK >= 0) & (columns_CK < held)
    if not held:
        return logits_CV.new_full(ids_CK.shape, -math.inf)
    return logits_CV.gather(1, columns_CK.clamp(0, held - 1)).masked_fill(~is_held_CK, -math.inf)


def _logits(hidden_CE: Tensor, head: OutputHead, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """The logits of a few rows at a time, over the temperature."""
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD), head.shard)
    for start in range(0, len(hidden_CE), ROWS):
        rows = slice(start, start + ROWS)
        yield rows, projection.logits(hidden_CE[rows]).div_(temperature)


def _gathered(own_CS: Tensor, head: OutputHead) -> Tensor:
    return AsyncAllGather(own_CS, head.shard).wait()


def _joined(parts: Sequence[dict[str, Tensor]], empty: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.cat([start, *(part[name] for part in parts)]) for name, start in empty.items()}


def _empty(top_k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "ids": torch.zeros(0, top_k, dtype=torch.int32),
        "log_probs": torch.zeros(0, top_k, dtype=dtype),
        "tail_log_prob": torch.zeros(0),
    }
