"""A job of ranks: exchanges contents whose lengths differ between the ranks."""

from collections.abc import Sequence

import torch
from kit.shard_ranks import Rank

from stillhouse.parallel import Ranks


def exchanged(rank: Rank, lengths: Sequence[int]) -> list[bytes] | None:
    """Return the contents of all ranks. lengths: of the content of each rank."""
    if rank.number >= len(lengths):
        return None
    return Ranks(rank.groups[len(lengths)], torch.device("cpu")).exchange(content(rank.number, lengths))


def content(number: int, lengths: Sequence[int]) -> bytes:
    return bytes((number + place) % 256 for place in range(lengths[number]))
