"""What the answers of a teacher's server must be, and what it means if they are not.

Each claim takes answers, as tensors of the rows of some documents by their names, and raises ValueError.

N rows, E the teacher's width, K ids per row.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stillhouse.models.load_proof import compare

Answer = Mapping[str, Tensor]
#: the largest allowed difference of two answers to one request: batches, kernels and half precision change rounding
SAME = 0.05


def row_differences(one: Answer, other: Answer) -> Tensor:
    """The differences of two answers for the same rows, [N], from 0 to about 1: the relative error of hidden states,
    or the total variation over ids, of which those that are absent from an answer have probability 0.
    """
    if "hidden" in one:
        one_NE, other_NE = one["hidden"].double(), other["hidden"].double()
        return (one_NE - other_NE).norm(dim=1) / other_NE.norm(dim=1).clamp_min(1e-30)
    one_NK, other_NK = one["log_probs"].double().exp(), other["log_probs"].double().exp()
    same_NKK = one["ids"][:, :, None] == other["ids"][:, None, :]
    shared_NK = (same_NKK * other_NK[:, None, :]).sum(2)
    absent_NK = ~same_NKK.any(1)
    return ((one_NK - shared_NK).abs().sum(1) + (other_NK * absent_NK).sum(1)) / 2


def require_near(
    answers: Sequence[Answer], expected: Sequence[Answer], what: str, fix: str, tolerance: float = SAME
) -> float:
    """Return the largest of all `row_differences`. Raises ValueError with `what` and `fix` beyond the tolerance."""
    differences = [row_differences(*pair) for pair in zip(answers, expected, strict=True)]
    return compare(torch.cat(differences), tolerance, f"{what} (they differ by {{error:.2g}}): {fix}", ValueError)


def require_informed(url: str, answers: Sequence[Answer], vocabulary: int | None) -> None:
    """Refuse uniform distributions and equal hidden states (lost weights), and normalised hidden states."""
    if "hidden" in answers[0]:
        hidden_NE = torch.cat([answer["hidden"] for answer in answers]).float()
        spread = (hidden_NE - hidden_NE[0]).norm() / hidden_NE.norm().clamp_min(1e-30)
        if not spread > 1e-6:
            raise ValueError(f"{url} gives the same hidden state for every token: it has lost the teacher's weights")
        if ((hidden_NE.norm(dim=1) - 1).abs() < 5e-3).all():
            raise ValueError(f"{url} gives hidden states of length 1: expected a server that does not normalise them")
        return
    log_probs_NK = torch.cat([answer["log_probs"] for answer in answers]).float()
    if (log_probs_NK.amax(1) - log_probs_NK.amin(1)).max() < 1e-4 and log_probs_NK.shape[1] > 1:
        uniform = "" if vocabulary is None else f" (−ln {vocabulary} is {-math.log(vocabulary):.4f})"
        raise ValueError(
            f"{url} gives every id the log-probability {float(log_probs_NK.mean()):.4f}{uniform}: the teacher is "
            "uniform; it has lost its weights"
        )


def require_aligned(url: str, places: Sequence[int], answers: Sequence[Answer], others: Sequence[Answer]) -> None:
    """Require that a token's row and later rows change with it, and that earlier rows do not.

    places: the token of each document that is another one in `others`.
    """
    before = at_token = after = 0.0
    for place, answer, other in zip(places, answers, others, strict=True):
        differences_N = row_differences(answer, other)
        before += float(differences_N[:place].max())
        at_token += float(differences_N[place])
        after += float(differences_N[place + 1 :].max())
    if not at_token > 5 * before or not at_token > 0:
        raise ValueError(
            f"{url}: after one token was changed, the rows before it changed by {before:.2g} and its own "
            f"row by {at_token:.2g}. The rows are shifted, or the model is not causal; row t must be the "
            "distribution of token t + 1"
        )
    if not after > before:
        raise ValueError(f"{url}: no row depends on an earlier token: the server has lost the teacher's layers")


def require_temperature(
    url: str, temperature: float, at_temperature: Sequence[Answer], at_1: Sequence[Answer]
) -> None:
    """Require that gaps of log-probabilities at a temperature are those at temperature 1, divided by it."""
    gap, gap_at_1 = (
        sum(float((answer["log_probs"][:, 0] - answer["log_probs"][:, -1]).double().sum()) for answer in answers)
        for answers in (at_temperature, at_1)
    )
    if not abs(gap * temperature - gap_at_1) <= 0.01 * abs(gap_at_1):
        raise ValueError(
            f"{url} ignores the temperature {temperature:g}: the gaps between log-probabilities add up to "
            f"{gap:.4g}, and to {gap_at_1:.4g} at temperature 1"
        )
