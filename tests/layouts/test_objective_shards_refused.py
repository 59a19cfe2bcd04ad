"""Every rank refuses a vocabulary shard, a label or a teacher that does not fit, and none waits for another one.

T tokens, D student width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.objective_cases import D, T
from kit.shard_ranks import Rank, on_ranks

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


def refusal(rank: Rank, mistake: str) -> str:
    """Return the engine's error for a mistake that every rank makes."""
    try:
        _MISTAKES[mistake][1](rank)
    except Exception as error:  # noqa: BLE001 the test says which one it should be
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _borders(*borders: tuple[int, int]) -> Callable[[Rank], None]:
    return lambda rank: _objective(rank, borders[rank.number])


def _objective(
    rank: Rank,
    border: tuple[int, int],
    *,
    rows: int | None = None,
    vocab_size: int | None = None,
    label: int = 3,
    teacher: Callable[[Rank], FullVocab | DenseLogits] | None = None,
    sharded: bool = True,
) -> None:
    start, stop = border
    shard = VocabShard(start, stop, rank.groups[4]) if sharded else None
    weight_VD = torch.zeros(stop - start if rows is None else rows, D)
    head = OutputHead(weight_VD, shard=shard, vocab_size=vocab_size)
    terms: list[Any] = [CrossEntropy(torch.full((T,), label))]
    terms += [Distill(teacher(rank), forward_kl())] if teacher else []
    linear_objective(torch.zeros(T, D), head, terms)


def _quarter(number: int) -> tuple[int, int]:
    return 10 * number, 10 * number + 10


def _teacher(border: Callable[[Rank], tuple[int, int]], group: Callable[[Rank], Any]) -> Callable[[Rank], FullVocab]:
    def of_rank(rank: Rank) -> FullVocab:
        start, stop = border(rank)
        shard = VocabShard(start, stop, group(rank))
        return FullVocab(torch.zeros(T, 24), OutputHead(torch.zeros(stop - start, 24), shard=shard))

    return of_rank


_HALF = _teacher(lambda rank: (20 * (rank.number % 2), 20 * (rank.number % 2) + 20), lambda rank: rank.pair)
_SAME = _teacher(lambda rank: _quarter(rank.number), lambda rank: rank.groups[4])
_GAP = _teacher(lambda rank: (11 * rank.number, 11 * rank.number + 10), lambda rank: rank.groups[4])

#: a part of the message, and the mistake, which every rank makes
_MISTAKES: dict[str, tuple[str, Callable[[Rank], None]]] = {
    "gap": ("20", _borders((0, 10), (10, 20), (21, 30), (30, 40))),
    "overlap": ("19", _borders((0, 10), (10, 20), (19, 30), (30, 40))),
    "not from 0": ("1:10", _borders((1, 10), (10, 20), (20, 30), (30, 40))),
    "all rows on every rank": ("0:40", _borders(*4 * [(0, 40)])),
    "rows that are not the shard's": ("11", lambda rank: _objective(rank, _quarter(rank.number), rows=11)),
    "vocab_size beyond all rows": ("41", lambda rank: _objective(rank, _quarter(rank.number), vocab_size=41)),
    "label beyond all rows": ("40", lambda rank: _objective(rank, _quarter(rank.number), label=40)),
    "label in the padding": ("25", lambda rank: _objective(rank, _quarter(rank.number), vocab_size=25, label=25)),
    "teacher on another group": ("group", lambda rank: _objective(rank, _quarter(rank.number), teacher=_HALF)),
    "teacher with a gap": ("10", lambda rank: _objective(rank, _quarter(rank.number), teacher=_GAP)),
    "sharded teacher, whole student": (
        "all rows",
        lambda rank: _objective(rank, (0, 40), teacher=_SAME, sharded=False),
    ),
    "teacher's columns": (
        "13",
        lambda rank: _objective(rank, _quarter(rank.number), teacher=lambda _: DenseLogits(torch.zeros(T, 13))),
    ),
    "columns that are not the shard's": ("11", lambda rank: _columns(rank, 11)),
}


def _columns(rank: Rank, columns: int) -> None:
    shard = VocabShard(*_quarter(rank.number), rank.groups[4])
    logits_objective(torch.zeros(T, columns), [CrossEntropy(torch.full((T,), 3))], shard=shard)


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_mistakes_are_refused_on_every_rank(mistake: str) -> None:
    for answer in on_ranks(refusal, 4, mistake, limit=20.0):
        assert answer.startswith("ValueError")
        assert _MISTAKES[mistake][0] in answer
