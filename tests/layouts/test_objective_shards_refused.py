"""Every rank refuses a vocabulary shard, a label or a teacher that does not fit, and none waits for another one.

T tokens, D student width, V vocabulary.
"""

from typing import Any

import pytest
import torch
from kit.config_cases import refused_calls
from kit.objective_cases import D, T
from kit.shard_ranks import Rank, message_of, on_ranks

from stillhouse.objective import (
    CrossEntropy,
    DenseLogits,
    Distill,
    FullVocab,
    OutputHead,
    VocabShard,
    forward_kl,
    linear_objective,
    logits_objective,
)

LABELS = [CrossEntropy(torch.full((T,), 3))]


def refusal(rank: Rank, call: str) -> str:
    """A job: the message for a call of one of these functions."""
    group, mine = rank.groups[4], (10 * rank.number, 10 * rank.number + 10)

    def objective(
        border: tuple[int, int],
        signal: FullVocab | DenseLogits | None = None,
        *,
        rows: int | None = None,
        label: int = 3,
        vocab_size: int | None = None,
        sharded: bool = True,
    ) -> None:
        weight_VD = torch.zeros(border[1] - border[0] if rows is None else rows, D)
        head = OutputHead(weight_VD, shard=VocabShard(*border, group) if sharded else None, vocab_size=vocab_size)
        terms: list[Any] = [CrossEntropy(torch.full((T,), label))]
        linear_objective(torch.zeros(T, D), head, terms + ([Distill(signal, forward_kl())] if signal else []))

    def teacher(start: int, stop: int, group: Any = group) -> FullVocab:
        head = OutputHead(torch.zeros(stop - start, 24), shard=VocabShard(start, stop, group))
        return FullVocab(torch.zeros(T, 24), head)

    def columns(count: int) -> None:
        logits_objective(torch.zeros(T, count), LABELS, shard=VocabShard(*mine, group))

    return message_of(eval, call, globals() | locals() | {"n": rank.number})


@pytest.mark.parametrize(("call", "message"), refused_calls("vocabulary shards"))
def test_mistakes_are_refused_on_every_rank(call: str, message: str) -> None:
    for answer in on_ranks(refusal, 4, call, limit=20.0):
        assert message in answer
