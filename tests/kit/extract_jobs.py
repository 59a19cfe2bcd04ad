"""Jobs for the ranks of test_extract.py: the tensors of a signal from a head whose vocabulary is sharded."""

from typing import Any, NamedTuple

import torch
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.objective import OutputHead, VocabShard
from stillhouse.signals.id_log_probs import chosen_log_probs, ranked_log_probs, top_k_log_probs


class Problem(NamedTuple):
    """hidden_CE, the head's weight and bias, ids and labels. borders: the rows of each rank."""

    hidden_CE: Tensor
    weight_VE: Tensor
    bias_V: Tensor
    ids_CK: Tensor
    labels_C: Tensor
    temperature: float
    top_k: int
    borders: tuple[tuple[int, int], ...]


def problem(borders: tuple[tuple[int, int], ...], top_k: int = 7, temperature: float = 2.0) -> Problem:
    """Peaked rows, so that one id has nearly all of the mass in some of them; absent and repeated ids."""
    torch.manual_seed(0)
    hidden_CE, weight_VE = torch.randn(37, 16) * 5, torch.randn(251, 16)
    ids_CK = torch.randint(0, 251, (37, top_k))
    ids_CK[::3, 2] = -1
    ids_CK[1::3, 3] = ids_CK[1::3, 1]
    ids_CK[5] = -1
    # the likeliest id is one of the chosen ones in some rows
    ids_CK[::2, 0] = (hidden_CE @ weight_VE.T).argmax(1)[::2]
    return Problem(
        hidden_CE, weight_VE, torch.randn(251), ids_CK, torch.randint(0, 251, (37,)), temperature, top_k, borders
    )


def signals(rank: Rank, given: Problem) -> dict[str, dict[str, Tensor]] | None:
    if rank.number >= len(given.borders):
        return None
    start, stop = given.borders[rank.number]
    shard = VocabShard(start, stop, rank.groups[len(given.borders)])
    return _signals(OutputHead(given.weight_VE[start:stop], given.bias_V[start:stop], shard=shard), given)


def whole(given: Problem) -> dict[str, dict[str, Tensor]]:
    return _signals(OutputHead(given.weight_VE, given.bias_V), given)


def _signals(head: OutputHead, given: Problem) -> dict[str, Any]:
    return {
        "top_k": top_k_log_probs(given.hidden_CE, head, given.top_k, given.temperature),
        "chosen": chosen_log_probs(given.hidden_CE, head, given.ids_CK, given.temperature),
        "ranked": ranked_log_probs(given.hidden_CE, head, given.labels_C, given.top_k),
    }
