"""The output processor that converts a teacher's hidden states to the tensors of a signal.

C rows of a micro-batch, E the teacher's width, K ids per row, M draws per row, N rows of a document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective import OutputHead
from stillhouse.signals.cache.files import document_id
from stillhouse.signals.id_log_probs import (
    chosen_log_probs,
    labelled_log_probs,
    ranked_log_probs,
    top_k_log_probs,
)
from stillhouse.signals.sampled_ids import draw, uniform_numbers
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
