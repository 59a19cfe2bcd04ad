"""Converts a teacher's hidden states to the tensors of a signal.

All log-probabilities are computed from the logits of the full vocabulary, in float32 at least. The mass outside the
ids is summed separately, because 1 − Σp has no correct digit where the ids have nearly all of the mass. If tensor
parallelism shards the vocabulary over ranks, each rank computes a few values per row from its shard. An all-gather
exchanges these values, and all ranks return the same result.

Sampled ids are drawn from the teacher's distribution (random sampling distillation, arXiv 2503.16870). The uniform
numbers for the draws come from a counter-based generator whose key is the document's id. So the draws of a row do not
depend on the batch or the process.

C rows of a micro-batch, E the teacher's width, V vocabulary (this rank's shard), K ids per row, M draws per row,
N rows of a document, R ranks over which the vocabulary is sharded, S values per row.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.objective.numerics import log_sum_exp
from stillhouse.objective.signals import first_occurrence
from stillhouse.objective.vocab import AsyncAllGather, top_k
from stillhouse.signals.cache_files import document_id
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

#: the logits of at most this many rows are in memory at a time
ROWS = 256


class Ranked(NamedTuple):
    """Requests the tensors of `ranked_log_probs`. The label of a row is the next token."""

    top_k: int


Wanted: TypeAlias = SignalSpec | Ranked


class SignalRows(NamedTuple):
    """Some rows of a micro-batch, and data for each row.

    index_C: the numbers of the rows, int64
    values_CX: for "chosen", the K ids of each row; for `Ranked` and signals with a label, the next token, [C, 1]; for
        "sampled", M uniform random numbers per row, float64; for other signals, an empty tensor
    """

    index_C: Tensor
    values_CX: Tensor = torch.zeros(0)

    @classmethod
    def of(cls, wanted: Wanted, documents: Sequence[DocumentRows], starts: Sequence[int]) -> Self:
        """Join the rows of some documents, one after another. starts: each document's first row in the batch"""
        placed = zip(documents, starts, strict=True)
        index_C = torch.cat([torch.arange(document.rows.start, document.rows.stop) + at for document, at in placed])
        if isinstance(wanted, Ranked) or wanted.with_label:  # a document's last row has no next token
            next_tokens = [np.append(one.tokens[1:], -1)[one.rows.start : one.rows.stop] for one in documents]
            return cls(index_C, torch.from_numpy(np.concatenate(next_tokens).astype(np.int64))[:, None])
        if wanted.kind == "chosen":
            return cls(index_C, torch.cat([document.ids_NK for document in documents if document.ids_NK is not None]))
        if wanted.kind == "sampled":
            numbers = [
                uniform_numbers(document_id(document.tokens, document.media), document.rows, wanted.entries)
                for document in documents
            ]
            return cls(index_C, torch.from_numpy(np.concatenate(numbers)))
        return cls(index_C)


@torch.no_grad()
def extract(wanted: Wanted, hidden_states: Tensor, head: OutputHead, rows: SignalRows) -> dict[str, Tensor]:
    """Return the tensors of `SignalSpec.tensors` or of `ranked_log_probs`, on the CPU.

    Under tensor parallelism, all ranks must pass the same rows, and get the same tensors.
    """
    values_CX = rows.values_CX
    hidden_CE = hidden_states.flatten(0, -2)[rows.index_C.to(hidden_states.device)]
    if isinstance(wanted, Ranked):
        return ranked_log_probs(hidden_CE, head, values_CX[:, 0], wanted.top_k)
    dtype = DTYPES[wanted.dtype]
    if wanted.kind == "hidden":
        return {"hidden": hidden_CE.to(dtype).cpu()}
    assert wanted.temperature is not None
    if wanted.kind == "sampled":
        return draw_ids(hidden_CE, head, values_CX, wanted.temperature)
    if wanted.kind == "chosen":
        return chosen_log_probs(hidden_CE, head, values_CX, wanted.temperature, dtype)
    labels_C = values_CX[:, 0] if wanted.with_label else None
    return top_k_log_probs(hidden_CE, head, wanted.entries, wanted.temperature, dtype, labels_C)


def uniform_numbers(document: bytes, rows: range, draws: int) -> np.ndarray:
    """Return uniform random numbers in [0, 1) for some rows of a document, [rows, draws] float64.

    document: the document's id of 16 bytes.

    The numbers are computed from the generator's raw output, which is the same in all versions of numpy.
    """
    generator = np.random.Philox(key=int.from_bytes(document, "little"))
    raw = generator.random_raw(rows.stop * draws).reshape(rows.stop, draws)[rows.start :]
    return (raw >> np.uint64(11)) * 2.0**-53


def draw_ids(hidden_CE: Tensor, head: OutputHead, uniform_CM: Tensor, temperature: float) -> dict[str, Tensor]:
    """Draw M ids per row with replacement, by inverting the cumulative distribution in float64.

    Returns the distinct ids of each row [C, M] int32 in ascending order, padded with -1, and their counts [C, M]
    uint8, padded with 0. A row has no ids if one of its logits is NaN or +inf, or if all logits are −inf.
    Raises ValueError if the head is sharded over ranks.
    """
    if head.shard is not None and not head.shard.is_alone:
        raise ValueError(
            "sampled ids need the whole vocabulary on one rank: expected parallel.tensor=1, or another signal"
        )
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    parts = []
    for rows_CE, chunk_CM in zip(hidden_CE.split(ROWS // 4), uniform_CM.split(ROWS // 4), strict=True):
        logits_CV = projection.logits(rows_CE).double().div_(temperature)
        cumulative_CV = logits_CV.sub_(logits_CV.amax(1, keepdim=True)).exp_().cumsum(1)
        total_C1 = cumulative_CV[:, -1:].contiguous()
        ids_CM = torch.searchsorted(cumulative_CV, chunk_CM.to(total_C1) * total_C1, right=True)
        # if the product rounds to the total, the draw is the last id with a mass above 0
        ids_CM = torch.minimum(ids_CM, torch.searchsorted(cumulative_CV, total_C1)).cpu().sort(1).values
        is_new_CM = torch.ones_like(ids_CM, dtype=torch.bool)
        is_new_CM[:, 1:] = ids_CM[:, 1:] != ids_CM[:, :-1]
        place_CM = is_new_CM.cumsum(1) - 1
        distinct_CM = torch.full_like(ids_CM, -1).scatter_(1, place_CM, ids_CM).int()
        counts_CM = torch.zeros_like(ids_CM).scatter_add_(1, place_CM, torch.ones_like(ids_CM)).to(torch.uint8)
        undefined_C1 = ~total_C1.isfinite().cpu()
        parts.append(
            {"ids": distinct_CM.masked_fill(undefined_C1, -1), "counts": counts_CM.masked_fill(undefined_C1, 0)}
        )
    return _joined(parts)


def top_k_log_probs(
    hidden_CE: Tensor,
    head: OutputHead,
    k: int,
    temperature: float,
    dtype: torch.dtype = torch.float32,
    labels_C: Tensor | None = None,
) -> dict[str, Tensor]:
    """The top-k ids of each row, their log-probabilities and the log of the mass outside these ids.

    labels_C: an additional id of each row, which becomes the last entry of ids and log_probs [C, K+1]. If this id is
        among the K ids, the entry has id -1 and log-probability -inf.
    Raises ValueError if the vocabulary has fewer than K ids, or if there are labels and the head is sharded.
    """
    if labels_C is not None and head.shard is not None and not head.shard.is_alone:
        raise ValueError(
            "a label's log-probability needs the whole vocabulary on one rank: expected parallel.tensor=1"
        )
    parts = []
    for rows, logits_CV in _logits(hidden_CE, head, temperature, k):
        if labels_C is None:
            best = top_k(logits_CV, k, head.shard)
        else:
            label_C1 = labels_C[rows].to(logits_CV.device)[:, None]
            label_logit_C1 = logits_CV.gather(1, label_C1)
            best = top_k(logits_CV, k, None, inside_C1=label_C1)
            is_known_C1 = (best.ids_CK == label_C1).any(1, keepdim=True)
            label_gap_C1 = (label_logit_C1 - best.largest_C[:, None]).masked_fill(is_known_C1, -math.inf)
            ids_CK = torch.cat([best.ids_CK, label_C1.masked_fill(is_known_C1, -1)], 1)
            best = replace(best, ids_CK=ids_CK, gap_CK=torch.cat([best.gap_CK, label_gap_C1], 1))
        parts.append(_stored(best.ids_CK, best.log_probs_CK, best.tail_log_prob_C, dtype))
    return _joined(parts)


def chosen_log_probs(
    hidden_CE: Tensor, head: OutputHead, ids_CK: Tensor, temperature: float, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The log-probabilities of the ids `ids_CK`, and the log of the mass outside these ids.

    A negative id and an id that repeats an earlier id of its row are absent entries: their log-probability is −inf.
    Raises ValueError for an id outside the vocabulary.
    """
    if ids_CK.numel() and int(ids_CK.max()) >= head.rows:
        raise ValueError(
            f"id {int(ids_CK.max())} of a teacher with a vocabulary of {head.rows}: expected a smaller id"
        )
    parts = []
    for rows, logits_CV in _logits(hidden_CE, head, temperature):
        chunk_CK = ids_CK[rows].to(logits_CV.device)
        values_CK, largest_C, outside_C = _chosen_of_all_ranks(logits_CV, chunk_CK, head)
        gap_CK = values_CK - largest_C[:, None]
        is_largest_CK = gap_CK == 0
        others_C = gap_CK.exp().masked_fill(is_largest_CK, 0.0).sum(1) + outside_C
        log_mass_C = log_sum_exp(is_largest_CK.sum(1).to(others_C.dtype), others_C)
        parts.append(_stored(chunk_CK, gap_CK - log_mass_C[:, None], outside_C.log() - log_mass_C, dtype))
    return _joined(parts)


def ranked_log_probs(hidden_CE: Tensor, head: OutputHead, labels_C: Tensor, k: int) -> dict[str, Tensor]:
    """The log-probability and rank of each row's label, and the top-k ids, at temperature 1, for `prompt_logprobs`.

    Returns log_prob [C], rank [C] int64 (the number of ids with at least the label's logit), ids [C, K] and
    log_probs [C, K]; K may be 0. Raises ValueError if the vocabulary has fewer than K ids.
    """
    parts = []
    for rows, logits_CV in _logits(hidden_CE, head, 1.0, k):
        label_C1 = labels_C[rows].to(logits_CV.device)[:, None]
        value_C1 = AsyncAllGather(_values(logits_CV, label_C1, head), head.shard).wait().amax(0)
        above_C1 = (logits_CV >= value_C1).sum(1, keepdim=True).to(logits_CV.dtype)
        above_C = AsyncAllGather(above_C1, head.shard).wait().sum(0)[:, 0]
        best = top_k(logits_CV, max(k, 1), head.shard)
        parts.append(
            {
                "log_prob": (value_C1[:, 0] - best.largest_C - best.log_mass_C).float().cpu(),
                "rank": above_C.long().cpu(),
                "ids": best.ids_CK[:, :k].int().cpu(),
                "log_probs": best.log_probs_CK[:, :k].float().cpu(),
            }
        )
    return _joined(parts)


def _chosen_of_all_ranks(logits_CV: Tensor, ids_CK: Tensor, head: OutputHead) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the ids `ids_CK` (−inf for absent entries), the largest logit m of the full vocabulary, and the
    sum of exp(logit − m) over all other ids. Overwrites logits_CV.
    """
    present_CK = first_occurrence(ids_CK, head.rows)
    values_CK = _values(logits_CV, ids_CK.masked_fill(~present_CK, -1), head)
    start, columns = (0 if head.shard is None else head.shard.start), logits_CV.shape[1]
    if columns:
        largest_C1 = logits_CV.amax(1, keepdim=True)
        columns_CK = ids_CK.long() - start
        # absent entries and the ids of other ranks are written to an additional column, which is dropped
        columns_CK = columns_CK.masked_fill(~present_CK | (columns_CK < 0) | (columns_CK >= columns), columns)
        is_chosen_CV = torch.zeros(len(logits_CV), columns + 1, dtype=torch.bool, device=logits_CV.device)
        is_chosen_CV = is_chosen_CV.scatter_(1, columns_CK, True)[:, :columns]
        rest_C1 = logits_CV.masked_fill_(is_chosen_CV, -math.inf).sub_(largest_C1).exp_().sum(1, keepdim=True)
    else:
        largest_C1 = logits_CV.new_full((len(logits_CV), 1), -math.inf)
        rest_C1 = torch.zeros_like(largest_C1)
    all_RCS = AsyncAllGather(torch.cat([values_CK, largest_C1, rest_C1], 1), head.shard).wait()
    largest_C = all_RCS[..., -2].amax(0)
    outside_C = (all_RCS[..., -1] * (all_RCS[..., -2] - largest_C).exp()).sum(0)
    return all_RCS[..., :-2].amax(0), largest_C, outside_C


def _values(logits_CV: Tensor, ids_CK: Tensor, head: OutputHead) -> Tensor:
    """The logits of the ids `ids_CK`, [C, K]; −inf for negative ids, and for ids outside this rank's shard."""
    start, columns = (0 if head.shard is None else head.shard.start), logits_CV.shape[1]
    columns_CK = ids_CK.long() - start
    is_held_CK = (ids_CK >= 0) & (columns_CK >= 0) & (columns_CK < columns)
    if not columns:
        return logits_CV.new_full(ids_CK.shape, -math.inf)
    return logits_CV.gather(1, columns_CK.clamp(0, columns - 1)).masked_fill(~is_held_CK, -math.inf)


def _logits(hidden_CE: Tensor, head: OutputHead, temperature: float, k: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Yield one or more slices of at most `ROWS` rows, with logits / temperature. Raises ValueError for K > V."""
    if not 0 <= k <= head.rows:
        raise ValueError(f"top_k={k} of a teacher with a vocabulary of {head.rows}: expected at most {head.rows}")
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD), head.shard)
    for start in range(0, max(1, len(hidden_CE)), ROWS):
        rows = slice(start, start + ROWS)
        yield rows, projection.logits(hidden_CE[rows]).div_(temperature)


def _stored(ids_CK: Tensor, log_probs_CK: Tensor, tail_C: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "ids": ids_CK.int().cpu(),
        "log_probs": log_probs_CK.to(dtype).cpu(),
        "tail_log_prob": tail_C.float().cpu(),
    }


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
