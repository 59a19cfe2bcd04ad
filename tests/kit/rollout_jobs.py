"""Jobs for ranks: an objective on drawn tokens over vocabulary shards, and a teacher's log-probabilities of them."""

from typing import Any

import torch
from kit.objective_cases import T, V, make_labels, make_leaves, make_mixture, make_signal
from kit.rollout_cases import fused, make_batch, spec_of
from kit.shard_cases import Layout, local_terms, shard_of
from kit.shard_ranks import Collectives, Rank
from torch import Tensor

from stillhouse.objective import Distill, FullVocab, Mixture, Signal, TopK, forward_kl, teacher_log_probs


def signal_of(kind: str, vocabulary: int = V, temperature: float = 1.0) -> Signal:
    """Return a signal by its name in `make_signal`, or top-k ids of which the first is the label."""
    if kind == "mixture":
        return make_mixture(vocabulary=vocabulary, temperature=temperature)
    if kind != "top-k":
        return make_signal(kind, vocabulary=vocabulary)
    others_TK = torch.arange(T)[:, None] + torch.arange(5) * 7
    ids_TK = torch.cat([make_labels(vocabulary=vocabulary).clamp(min=0)[:, None], others_TK], 1)
    log_p_TV = torch.log_softmax(make_leaves(T, 1, vocabulary).hidden / temperature, 1)
    return TopK(ids_TK, log_p_TV.gather(1, ids_TK), "drop", temperature=temperature)


def rollouts(rank: Rank, job: tuple[str, str, int, Layout]) -> tuple[Tensor, dict[str, Tensor]] | None:
    """Run a spec's processor; returns this rank's loss and gradients."""
    case, kind, vocabulary, layout = job
    if rank.number >= len(layout.student):
        return None
    leaves, shard = make_leaves(), shard_of(rank, layout.student)
    rows = slice(shard.start, shard.stop)
    local = type(leaves)(leaves.hidden, leaves.weight[rows], None if leaves.bias is None else leaves.bias[rows])
    batch, signal = make_batch(vocabulary=vocabulary), local_signal(rank, layout, signal_of(kind))
    output, gradients = fused(spec_of(case), local, batch, signal, 16, shard=shard, vocab_size=vocabulary)
    return output.loss.detach(), gradients


def log_probs(rank: Rank, job: tuple[str, Layout]) -> tuple[Tensor, dict[str, int]] | None:
    """Return a teacher's log-probabilities, and the collectives that they took after the borders were known."""
    kind, layout = job
    if rank.number >= len(layout.student):
        return None
    signal, shard = local_signal(rank, layout, signal_of(kind, temperature=1.3)), shard_of(rank, layout.student)
    options: dict[str, Any] = {"vocabulary": V, "shard": shard}
    teacher_log_probs(signal, make_labels(), 1.3, **options)
    with Collectives() as collectives:
        actual_T = teacher_log_probs(signal, make_labels(), 1.3, **options)
    return actual_T, dict(collectives.counts)


def local_signal(rank: Rank, layout: Layout, signal: Signal) -> Signal:
    if not isinstance(signal, Mixture | FullVocab) and "logits_TV" not in vars(signal):
        return signal
    (term,) = local_terms(rank, layout, [Distill(signal, forward_kl(), temperature=signal.temperature or 1.0)])
    return term.signals()[0]
