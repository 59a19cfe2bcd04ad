"""The order of a training's sequences: permutations, and interleaving of weighted sources.

A weight is a share of the tokens. A source's share s of the sequences is therefore proportional to its weight divided
by the mean number of tokens of its sequences. The k-th sequence of a source (from 0) gets the time (k + 1/2) / s. The
sequences of all sources are sorted by these times, so that each step has nearly the right shares. When all sequences
of a source are used, the source begins again in another order. The order depends only on the seed, so that the number
of a step determines its data.

S sequences.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def weighted_order(
    source_S: np.ndarray, tokens_S: np.ndarray, weights: Sequence[float], total: int, seed: int
) -> np.ndarray:
    """The numbers of the sequences of a training on `total` sequences, [total] int64.

    A longer training begins with the order of a shorter one. Raises ValueError if a source has no sequence.

    source_S, tokens_S: the source and the number of tokens of each sequence.
    weights: the weights of the sources, above 0.
    """
    members = [np.flatnonzero(source_S == number) for number in range(len(weights))]
    if empty := [number for number, sequences in enumerate(members) if not len(sequences)]:
        raise ValueError(f"source number {empty[0] + 1} of the mixture has no documents to train on")
    rates = np.array([weight / tokens_S[of].mean() for weight, of in zip(weights, members, strict=True)])
    shares = rates / rates.sum()
    # so many sequences of a source are enough, because no source lags behind its share by a sequence or more
    counts = np.ceil((total + len(weights)) * shares).astype(np.int64) + 1
    times = np.concatenate([(np.arange(count) + 0.5) / share for count, share in zip(counts, shares, strict=True)])
    sequences = [_repeated(of, int(count), seed) for of, count in zip(members, counts, strict=True)]
    return np.concatenate(sequences)[np.argsort(times, kind="stable")[:total]]


def _repeated(members: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Repeat all members, in another order in each epoch, and return the first `count` of the result."""
    epochs = range(-(-count // len(members)))
    return np.concatenate([members[permutation(len(members), seed, epoch + 1)] for epoch in epochs])[:count]


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, number: int) -> np.ndarray:
    """Permutation `number` of a seed. It is made from raw 64-bit integers, because their stream is the same in all
    versions of numpy, unlike numpy's shuffles. The result is cached and must not be modified.
    """
    sort_keys = np.random.PCG64(np.random.SeedSequence([seed, number])).random_raw(size)
    order = np.argsort(sort_keys, kind="stable")
    order.flags.writeable = False
    return order
