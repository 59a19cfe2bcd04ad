"""Processes exchange contents of any length: the first bytes in one message, the rest of longer ones in another."""

from collections.abc import Sequence

import pytest
import torch
from kit.shard_ranks import Rank, on_ranks

from stillhouse.parallel import Ranks
from stillhouse.parallel.ranks import FIRST_BYTES as FIRST


def exchanged(rank: Rank, lengths: Sequence[int]) -> list[bytes]:
    """Return the contents of all ranks. lengths: of the content of each rank."""
    return Ranks(rank.groups[len(lengths)], torch.device("cpu")).exchange(content(rank.number, lengths))


def content(number: int, lengths: Sequence[int]) -> bytes:
    return bytes((number + place) % 256 for place in range(lengths[number]))


@pytest.mark.parametrize(
    "lengths", [(0, 0), (7, FIRST), (FIRST + 1, 0), (FIRST - 1, 3 * FIRST + 5), (FIRST + 1, FIRST + 2, 0)]
)
def test_contents_of_all_ranks(lengths: Sequence[int]) -> None:
    expected = [content(number, lengths) for number in range(len(lengths))]
    assert on_ranks(exchanged, len(lengths), lengths) == [expected] * len(lengths)
