"""Makes the tensors of a signal from the numbers in an engine's answer. N rows of a document, K ids per row."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stillhouse.objective.signals import TAIL_FLOOR
from stillhouse.signals.signal_spec import DTYPES, DocumentRows, SignalSpec


def top_k_tensors(
    entries: Sequence[Mapping[int, float]], document: DocumentRows, spec: SignalSpec, path: str
) -> dict[str, Tensor]:
    """Make the tensors of "top_k" from an engine's log-probabilities. The tail is computed from them.

    entries: entry t has the top ids that row t − 1 predicts in place of token t, and their log-probabilities. Engines
        add token t itself if it is not among the top ids.
    path: the path of the request, for messages.

    Raises ValueError unless every entry has the document's token, and K ids with log-probabilities.
    """
    assert spec.top_k is not None
    if len(entries) != document.rows.stop + 1:
        raise ValueError(f"{path} scored {len(entries)} tokens: expected {document.rows.stop + 1}")
    ids_NK = np.empty((len(document.rows), spec.top_k), np.int32)
    log_probs_NK = np.empty((len(document.rows), spec.top_k))
    for number, (row, next_token) in enumerate(zip(document.rows, next_tokens(document), strict=True)):
        log_probs = dict(entries[row + 1])
        if next_token not in log_probs:
            raise ValueError(f"row {row} lacks token {next_token}, which follows it: the rows are shifted")
        if len(log_probs) == spec.top_k + 1:
            del log_probs[next_token]  # the engine added it, because it is not among the top ids
        if len(log_probs) != spec.top_k:
            raise ValueError(f"row {row} has {len(log_probs)} ids: expected the top {spec.top_k}")
        ranked = sorted(log_probs.items(), key=lambda pair: -pair[1])
        ids_NK[number], log_probs_NK[number] = zip(*ranked, strict=True)
    return id_tensors(ids_NK, log_probs_NK, spec)


def id_tensors(ids_NK: np.ndarray, log_probs_NK: np.ndarray, spec: SignalSpec) -> dict[str, Tensor]:
    """Make the tensors of "top_k" or "chosen".

    The probability outside the ids is 1 − Σp in float64, at least `TAIL_FLOOR`. Its precision is that of the engine's
    numbers. Raises ValueError for numbers that are no log-probabilities.
    """
    mass_N = np.exp(np.minimum(log_probs_NK.astype(np.float64), 1.0)).sum(1)
    if not (mass_N <= 1 + 1e-3).all():
        raise ValueError("its log-probabilities are NaN, or add up to more than 1")
    return {
        "ids": torch.from_numpy(ids_NK),
        "log_probs": torch.from_numpy(log_probs_NK).to(DTYPES[spec.dtype]),
        "tail_log_prob": torch.from_numpy(np.log(np.maximum(1 - mass_N, TAIL_FLOOR))).float(),
    }


def next_tokens(document: DocumentRows) -> Sequence[int]:
    """The token after each row. Raises ValueError if the document's last row is requested: no engine scores it."""
    following = document.tokens[document.rows.start + 1 : document.rows.stop + 1].tolist()
    if len(following) != len(document.rows):
        raise ValueError("the last row of a document has no next token: expected rows before it")
    return following
