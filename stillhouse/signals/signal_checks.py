"""Checks the tensors of a signal: finds impossible values, and computes the difference between two answers.

N rows, E the teacher's width, K ids per row, M draws per row, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stillhouse.signals.signal_spec import SignalSpec

#: the largest allowed difference between 1 and the total mass of a row, by the dtype of the log-probabilities
MASS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.01}


def problem_in(spec: SignalSpec, vocabulary: int, tensors: Mapping[str, Tensor]) -> str:
    """Describe the first value that no teacher can give; "" if there is none. vocabulary: the teacher's head rows"""
    if spec.kind == "hidden":
        return "" if tensors["hidden"].isfinite().all() else "'hidden' is not finite"
    if spec.kind == "sampled":
        return _problem_of_draws(tensors["ids"], tensors["counts"], spec.entries, vocabulary)
    return _problem_of_ids(spec, vocabulary, tensors["ids"], tensors["log_probs"], tensors["tail_log_prob"])


def largest_difference(answers: Sequence[dict[str, Tensor]], expected: Sequence[dict[str, Tensor]]) -> float:
    """The largest of all `row_differences`; NaN if one of them is NaN."""
    return float(torch.cat([row_differences(*pair) for pair in zip(answers, expected, strict=True)]).max())


def row_differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """The differences of two answers for the same rows, [N], from 0 to about 1.

    For hidden states, the difference is the relative error. For ids, it is the total variation; an id that is absent
    from an answer has probability 0 in this answer.
    """
    if "hidden" in one:
        one_NE, other_NE = one["hidden"].double(), other["hidden"].double()
        return (one_NE - other_NE).norm(dim=1) / other_NE.norm(dim=1).clamp_min(1e-30)
    one_NK, other_NK = one["log_probs"].double().exp(), other["log_probs"].double().exp()
    same_NKK = one["ids"][:, :, None] == other["ids"][:, None, :]
    shared_NK = (same_NKK * other_NK[:, None, :]).sum(2)
    absent_NK = ~same_NKK.any(1)
    return ((one_NK - shared_NK).abs().sum(1) + (other_NK * absent_NK).sum(1)) / 2


def _problem_of_draws(ids_NM: Tensor, counts_NM: Tensor, draws: int, vocabulary: int) -> str:
    if (ids_NM >= vocabulary).any() or (ids_NM < -1).any():
        return f"'ids' has an id that is not in the vocabulary of {vocabulary}"
    if ((ids_NM >= 0) != (counts_NM > 0)).any() or (ids_NM[:, 1:] >= 0)[ids_NM[:, :-1] < 0].any():
        return "'ids' and 'counts' do not fit each other"
    if ((ids_NM[:, 1:] <= ids_NM[:, :-1]) & (ids_NM[:, 1:] >= 0)).any():
        return "'ids' has an id twice in a row, or not in ascending order"
    if (counts_NM.sum(1, dtype=torch.int64) != draws).any():
        return f"'counts' of a row do not add up to {draws} draws"
    return ""


def _problem_of_ids(spec: SignalSpec, vocabulary: int, ids_NK: Tensor, log_probs_NK: Tensor, tail_N: Tensor) -> str:
    if (ids_NK >= vocabulary).any() or (ids_NK < -1).any():
        return f"'ids' has an id that is not in the vocabulary of {vocabulary}"
    if log_probs_NK.isnan().any() or tail_N.isnan().any():
        return "'log_probs' or 'tail_log_prob' has NaN"
    if (log_probs_NK > 0).any() or (tail_N > MASS_TOLERANCE["float32"]).any():
        return "'log_probs' or 'tail_log_prob' has a positive number"
    ordered_NK = ids_NK.sort(1).values
    if ((ordered_NK[:, 1:] == ordered_NK[:, :-1]) & (ordered_NK[:, 1:] >= 0)).any():
        return "'ids' has an id twice in a row"
    mass_N = log_probs_NK.double().exp().masked_fill(ids_NK < 0, 0.0).sum(1) + tail_N.double().exp()
    if spec.kind == "top_k" and ((mass_N - 1).abs() > MASS_TOLERANCE[spec.dtype]).any():
        return "'log_probs' and 'tail_log_prob' of a row do not add up to 1"
    return ""
