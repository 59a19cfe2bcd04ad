"""Processes exchange contents of any length: the first bytes in one message, the rest of longer ones in another."""

from collections.abc import Sequence

import pytest
from kit.exchange_jobs import content, exchanged
from kit.shard_ranks import shared_pool

from stillhouse.parallel.ranks import FIRST_BYTES as FIRST


@pytest.mark.parametrize(
    "lengths", [(0, 0), (7, FIRST), (FIRST + 1, 0), (FIRST - 1, 3 * FIRST + 5), (FIRST + 1, FIRST + 2, 0)]
)
def test_contents_of_all_ranks(lengths: Sequence[int]) -> None:
    expected = [content(number, lengths) for number in range(len(lengths))]
    assert shared_pool().call(exchanged, lengths)[: len(lengths)] == [expected] * len(lengths)
