"""What the client needs of an engine: who it is, and how to ask it for the signals of documents."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective.signals import TAIL_FLOOR
from stillhouse.serving.client.pool import Call, ServerPool
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec

#: for each document of a request, the signal's tensors
Scores = list[dict[str, Tensor]]
#: a request, and the numbers of the documents in it
NumberedCall = tuple[Sequence[int], Call[Scores]]


class NeedsModelError(ValueError):
    """A server does not offer what the run needs of the teacher's files, so that the run must have the model."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself; None is what it does not say.

    model: the name under which it serves the teacher. identity: a hash of the teacher's weights. vocabulary: rows of
    the teacher's head. width: E. dtype: in which the teacher computes. max_tokens: the longest document that it
    scores. request_tokens: of all documents of a request. max_top_k: ids per token. signals: which it gives. files:
    the names and hashes of the files of the teacher's folder, if it offers them. quantize: how its layers are
    quantized, if they are.
    """

    url: str
    model: str
    identity: str | None = None
    vocabulary: int | None = None
    width: int | None = None
    dtype: str | None = None
    max_tokens: int | None = None
    request_tokens: int | None = None
    max_top_k: int | None = None
    signals: frozenset[str] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    quantize: str | None = None


class Api(Protocol):
    """How one kind of server is asked.

    signals: what it can give; only those in `any_temperature` also at a temperature other than 1.
    """

    name: ClassVar[str]
    signals: ClassVar[frozenset[str]]
    any_temperature: ClassVar[frozenset[str]]

    def recognises(self, pool: ServerPool, url: str) -> bool:
        """Whether the server at this address is of this kind."""
        ...

    def describe(self, pool: ServerPool, url: str) -> ServerInfo:
        """Raises ValueError if the server does not answer as expected."""
        ...

    def tokenize(self, pool: ServerPool, server: ServerInfo, text: str) -> list[int] | None:
        """The ids of a text without special tokens; None if the server does not tell them."""
        ...

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, wanted: Sequence[DocumentRows]
    ) -> list[NumberedCall]:
        """The requests that give the signals of documents."""
        ...


def sparse_scores(pairs: Sequence[Mapping[int, float]], spec: SignalSpec) -> dict[str, Tensor]:
    """The tensors of "top_k" from each row's ids and log-probabilities, without the mass outside.

    The mass outside is computed in float64 as 1 − Σp, which is exact only to the precision of the given numbers; it
    is at least `TAIL_FLOOR`. Raises ValueError for a row with fewer than K ids, and for numbers that are no
    log-probabilities.
    """
    assert spec.top_k is not None
    ids_NK = np.empty((len(pairs), spec.top_k), np.int32)
    log_probs_NK = np.empty((len(pairs), spec.top_k))
    for row, each in enumerate(pairs):
        best = sorted(each.items(), key=lambda pair: -pair[1])
        if len(best) != spec.top_k:
            raise ValueError(f"row {row} has {len(best)} ids: expected the {spec.top_k} likeliest ones")
        ids_NK[row], log_probs_NK[row] = zip(*best, strict=True)
    return scores_of_ids(ids_NK, log_probs_NK, spec)


def scores_of_ids(ids_NK: np.ndarray, log_probs_NK: np.ndarray, spec: SignalSpec) -> dict[str, Tensor]:
    """The tensors of "top_k" or "chosen". The mass outside is computed as in `sparse_scores`."""
    mass_N = np.exp(log_probs_NK.astype(np.float64)).sum(1)
    if np.isnan(log_probs_NK).any() or (mass_N > 1 + 1e-3).any():
        raise ValueError("its log-probabilities are NaN, or add up to more than 1")
    return {
        "ids": torch.from_numpy(ids_NK),
        "log_probs": torch.from_numpy(log_probs_NK).to(DTYPES[spec.dtype]),
        "tail_log_prob": torch.from_numpy(np.log(np.maximum(1 - mass_N, TAIL_FLOOR))).float(),
    }


def next_tokens(document: DocumentRows) -> Sequence[int]:
    """The token that follows each of the rows. Raises ValueError for the last row, which no engine scores."""
    following = document.tokens[document.rows.start + 1 : document.rows.stop + 1].tolist()
    if len(following) != len(document.rows):
        raise ValueError("the last row of a document has no next token: expected rows before it")
    return following
