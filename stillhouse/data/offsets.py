"""Offsets of concatenated parts with different lengths: where each part begins and ends."""

from collections.abc import Sequence

import numpy as np


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The offsets of D consecutive parts with these lengths, [D+1] int64. Part d is `offsets[d]:offsets[d+1]`."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def chosen_tokens(offsets: np.ndarray, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenate the chosen parts. Returns their new offsets, and for each token of the result its old index."""
    numbers = np.asarray(chosen, dtype=np.int64)
    lengths = offsets[numbers + 1] - offsets[numbers]  # np.diff(offsets) would read all offsets
    new_offsets = offsets_of(lengths)
    shift_N = np.repeat(offsets[numbers] - new_offsets[:-1], lengths)
    return new_offsets, np.arange(new_offsets[-1]) + shift_N
