"""Jobs for the ranks of test_extract.py: the tensors of a signal from a head whose vocabulary is sharded."""

from typing import NamedTuple

import torch
from kit.shard_ranks import Rank
from torch import Tensor

from stillhouse.objective import OutputHead, VocabShard
from stillhouse.signals.id_log_probs import (
    chosen_log_probs,
    labelled_log_probs,
    ranked_log_probs,
    top_k_log_probs,
)

#: the tensors of signals, by their kinds
Signals = dict[str, dict[str, Tensor]]


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
    ids_CK, labels_C = torch.randint(0, 251, (37, top_k)), torch.randint(0, 251, (37,))
    ids_CK[::3, 2] = -1
    ids_CK[1::3, 3] = ids_CK[1::3, 1]
    ids_CK[5] = -1
    # the likeliest id is one of the chosen ones in some rows, and the label in others
    top_C = (hidden_CE @ weight_VE.T).argmax(1)
    ids_CK[::2, 0] = top_C[::2]
    labels_C[:5] = top_C[:5]
    return Problem(hidden_CE, weight_VE, torch.randn(251), ids_CK, labels_C, temperature, top_k, borders)


def signals(rank: Rank, case: Problem) -> Signals | None:
    """Those of this rank's shard; None on a rank that has none."""
    if rank.number >= len(case.borders):
        return None
    start, stop = case.borders[rank.number]
    shard = VocabShard(start, stop, rank.groups[len(case.borders)])
    return _signals(OutputHead(case.weight_VE[start:stop], case.bias_V[start:stop], shard=shard), case)


def unsharded_signals(case: Problem) -> Signals:
    """Those of the whole vocabulary, and the one with a label, which shards cannot give."""
    head = OutputHead(case.weight_VE, case.bias_V)
    labelled = labelled_log_probs(case.hidden_CE, head, case.labels_C, case.top_k, case.temperature)
    return _signals(head, case) | {"labelled": labelled}


def _signals(head: OutputHead, case: Problem) -> Signals:
    return {
        "top_k": top_k_log_probs(case.hidden_CE, head, case.top_k, case.temperature),
        "chosen": chosen_log_probs(case.hidden_CE, head, case.ids_CK, case.temperature),
        "ranked": ranked_log_probs(case.hidden_CE, head, case.labels_C, case.top_k),
    }
