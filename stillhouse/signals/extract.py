"""The output processor that converts a teacher's hidden states to the tensors of a signal.

Sampled ids are drawn from the teacher's distribution (random sampling distillation, arXiv 2503.16870). The uniform
numbers for the draws come from a counter-based generator whose key is the document's id. So the draws of a row do not
depend on the batch or the process.

C rows of a micro-batch, E the teacher's width, V vocabulary, K ids per row, M draws per row, N rows of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.objective.head import Projection, operand_dtype
from stillhouse.signals.cache.files import document_id
from stillhouse.signals.id_log_probs import (
    ROWS,
    chosen_log_probs,
    labelled_log_probs,
    ranked_log_probs,
    top_k_log_probs,
)
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec


class Ranked(NamedTuple):
    """Requests the tensors of `ranked_log_probs`. The label of a row is the next token."""

    top_k: int


Wanted: TypeAlias = SignalSpec | Ranked


class SignalRows(NamedTuple):
    """The context of `Extract`: some rows of a micro-batch, and data for each row.

    index_C: the numbers of the rows, int64
    values_CX: "chosen": the K ids of each row. `Ranked` and signals with a label: the next token, [C, 1]. "sampled":
        M uniform random numbers per row, float64. Other signals: an empty tensor
    """

    index_C: Tensor
    values_CX: Tensor = torch.zeros(0)

    @classmethod
    def of(cls, wanted: Wanted, documents: Sequence[DocumentRows], starts: Sequence[int]) -> Self:
        """The rows of some documents, one document after another. starts: each document's first row in the batch"""
        index_C = torch.cat(
            [
                torch.arange(document.rows.start, document.rows.stop) + start
                for document, start in zip(documents, starts, strict=True)
            ]
        )
        if isinstance(wanted, Ranked) or wanted.with_label:
            return cls(index_C, torch.cat([_next_tokens(document) for document in documents]))
        if wanted.kind == "chosen":
            return cls(index_C, torch.cat([document.ids_NK for document in documents if document.ids_NK is not None]))
        if wanted.kind == "sampled":
            numbers = [
                uniform_numbers(document_id(document.tokens, document.media), document.rows, wanted.entries)
                for document in documents
            ]
            return cls(index_C, torch.from_numpy(np.concatenate(numbers)))
        return cls(index_C)


@dataclass(frozen=True)
class Extract:
    """Returns the tensors of `SignalSpec.tensors` or of `ranked_log_probs`, on the CPU.

    Under tensor parallelism, all ranks must pass the same rows, and get the same tensors.
    """

    wanted: Wanted

    @torch.no_grad()
    def __call__(
        self, *, hidden_states: Tensor, head: OutputHead, context: SignalRows, depth: int = 0
    ) -> dict[str, Tensor]:
        wanted, values_CX = self.wanted, context.values_CX
        hidden_CE = hidden_states.flatten(0, -2)[context.index_C.to(hidden_states.device)]
        if isinstance(wanted, Ranked):
            return ranked_log_probs(hidden_CE, head, values_CX[:, 0], wanted.top_k)
        dtype = DTYPES[wanted.dtype]
        if wanted.kind == "hidden":
            return {"hidden": hidden_CE.to(dtype).cpu()}
        assert wanted.temperature is not None
        if wanted.kind == "sampled":
            return draw(hidden_CE, head, values_CX, wanted.temperature)
        if wanted.kind == "chosen":
            return chosen_log_probs(hidden_CE, head, values_CX, wanted.temperature, dtype)
        if wanted.with_label:
            return labelled_log_probs(hidden_CE, head, values_CX[:, 0], wanted.entries, wanted.temperature, dtype)
        return top_k_log_probs(hidden_CE, head, wanted.entries, wanted.temperature, dtype)


def _next_tokens(document: DocumentRows) -> Tensor:
    """The next token of each row, [N, 1]; -1 for the document's last row."""
    next_N = np.append(document.tokens[1:], -1)[document.rows.start : document.rows.stop]
    return torch.from_numpy(next_N.astype(np.int64))[:, None]


def uniform_numbers(document: bytes, rows: range, draws: int) -> np.ndarray:
    """Numbers in [0, 1) for some rows of a document, [rows, draws] float64. document: its id of 16 bytes

    The numbers are computed from the generator's raw output, which is the same in all versions of numpy.
    """
    generator = np.random.Philox(key=int.from_bytes(document, "little"))
    raw = generator.random_raw(rows.stop * draws).reshape(rows.stop, draws)[rows.start :]
    return (raw >> np.uint64(11)) * 2.0**-53


def draw(hidden_CE: Tensor, head: OutputHead, uniform_CM: Tensor, temperature: float) -> dict[str, Tensor]:
    """Draw M ids per row with replacement, by inverting the cumulative distribution in float64.

    Returns ids [C, M] and counts [C, M] as `distinct` does. A row has no ids if one of its logits is NaN or +inf, or
    if all logits are −inf. Raises ValueError if the head is sharded over ranks.
    """
    if head.shard is not None and not head.shard.is_alone:
        raise ValueError("draws need the whole vocabulary on one rank: expected tensor=1, or another signal")
    draws = uniform_CM.shape[1]
    projection = Projection(head, head.rows, operand_dtype(hidden_CE, head.weight_VD))
    ids, counts = [torch.zeros(0, draws, dtype=torch.int32)], [torch.zeros(0, draws, dtype=torch.uint8)]
    for rows_CE, chunk_CM in zip(hidden_CE.split(ROWS // 4), uniform_CM.split(ROWS // 4), strict=True):
        logits_CV = projection.logits(rows_CE).double().div_(temperature)
        cumulative_CV = logits_CV.sub_(logits_CV.amax(1, keepdim=True)).exp_().cumsum(1)
        total_C1 = cumulative_CV[:, -1:].contiguous()
        ids_CM = torch.searchsorted(cumulative_CV, chunk_CM.to(total_C1) * total_C1, right=True)
        # if the product rounds to the total, the draw is the last id with a mass above 0
        ids_CM = torch.minimum(ids_CM, torch.searchsorted(cumulative_CV, total_C1))
        distinct_CM, counts_CM = distinct(ids_CM.cpu())
        undefined_C = ~total_C1[:, 0].isfinite().cpu()
        ids.append(distinct_CM.masked_fill(undefined_C[:, None], -1))
        counts.append(counts_CM.masked_fill(undefined_C[:, None], 0))
    return {"ids": torch.cat(ids), "counts": torch.cat(counts)}


def distinct(ids_CM: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids of each row in ascending order, padded with -1, int32; their counts, padded with 0, uint8."""
    sorted_CM = ids_CM.sort(1).values
    is_new_CM = torch.ones_like(sorted_CM, dtype=torch.bool)
    is_new_CM[:, 1:] = sorted_CM[:, 1:] != sorted_CM[:, :-1]
    place_CM = is_new_CM.cumsum(1) - 1
    distinct_CM = torch.full_like(sorted_CM, -1).scatter_(1, place_CM, sorted_CM)
    counts_CM = torch.zeros_like(sorted_CM).scatter_add_(1, place_CM, torch.ones_like(sorted_CM))
    return distinct_CM.int(), counts_CM.to(torch.uint8)
