"""The output processor that turns a teacher's hidden states into the tensors of a signal.

C rows of T tokens, E the teacher's width, K ids per row, M draws per row, N rows of a document.
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
    """Requests the tensors of `ranked_log_probs`. The label of a row is the next token; the last row has no label."""

    top_k: int


Wanted: TypeAlias = SignalSpec | Ranked


class SignalRows(NamedTuple):
    """The context of `Extract`: some rows of a micro-batch.

    index_C: int64, the rows
    values_CX: what the signal needs for each row. "chosen": the K ids. `Ranked` and signals with a label: the token
        that follows. "sampled": M random numbers in [0, 1), float64. Other signals: an empty tensor
    """

    index_C: Tensor
    values_CX: Tensor = torch.zeros(0)

    @classmethod
    def of(cls, wanted: Wanted, documents: Sequence[DocumentRows], starts: Sequence[int]) -> Self:
        """The rows of some documents, one document after the other.

        starts: the row of the micro-batch at which each document begins
        """
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
                uniform_numbers(document_id(document.tokens), document.rows, wanted.entries) for document in documents
            ]
            return cls(index_C, torch.from_numpy(np.concatenate(numbers)))
        return cls(index_C)


@dataclass(frozen=True)
class Extract:
    """Returns the tensors of `SignalSpec.tensors` or of `ranked_log_probs` on the CPU.

    Under tensor parallelism, all ranks pass the same rows and get the same tensors.
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
    """The token that follows each row, [N, 1]; -1 after the last token."""
    next_N = np.append(document.tokens[1:], -1)[document.rows.start : document.rows.stop]
    return torch.from_numpy(next_N.astype(np.int64))[:, None]
