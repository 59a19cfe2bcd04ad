"""The tensors of a signal from the numbers in an engine's answer.

N rows of a document, K ids per row.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective.signals import TAIL_FLOOR
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec


def top_k_tensors(rows: Sequence[Mapping[int, float]], spec: SignalSpec) -> dict[str, Tensor]:
    """The tensors of "top_k" from each row's ids and log-probabilities, without the mass outside.

    Raises ValueError for a row with fewer than K ids, and for numbers that are no log-probabilities.
    """
    assert spec.top_k is not None
    ids_NK = np.empty((len(rows), spec.top_k), np.int32)
    log_probs_NK = np.empty((len(rows), spec.top_k))
    for number, log_probs in enumerate(rows):
        best = sorted(log_probs.items(), key=lambda pair: -pair[1])
        if len(best) != spec.top_k:
            raise ValueError(f"row {number} has {len(best)} ids: expected the {spec.top_k} likeliest ones")
        ids_NK[number], log_probs_NK[number] = zip(*best, strict=True)
    return id_tensors(ids_NK, log_probs_NK, spec)


def id_tensors(ids_NK: np.ndarray, log_probs_NK: np.ndarray, spec: SignalSpec) -> dict[str, Tensor]:
    """The tensors of "top_k" or "chosen".

    The mass outside is computed in float64 as 1 − Σp, which is exact only to the precision of the given numbers; it
    is at least `TAIL_FLOOR`. Raises ValueError for numbers that are no log-probabilities.
    """
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
