"""Packing: whole documents into sequences of at most `max_tokens`, and the order in which the sequences are
trained.

Documents are packed once, by best fit on decreasing length. What changes from epoch to epoch is the order
of the sequences: a permutation that depends on (seed, epoch) alone. So the data of a step follows from its
number, and a resumed run goes on exactly where it stopped without any state.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from stillhouse.data.batches import Batch, make_batch
from stillhouse.data.documents import Documents


class PackedSequences:
    """The documents as packed sequences, numbered 0 to len-1.

    max_tokens: capacity of a sequence; seed: of the order and of which documents of equal length meet;
    shuffle=False keeps ties and sequences in the order they come in (evaluation).
    """

    def __init__(self, documents: Documents, *, max_tokens: int, seed: int, shuffle: bool = True):
        lengths_D = documents.lengths_D
        if len(lengths_D) == 0 or lengths_D.max() > max_tokens:
            raise ValueError(
                f"documents of at most {max_tokens} tokens are needed to pack, got "
                f"{len(lengths_D)} of at most {lengths_D.max(initial=0)}"
            )
        self.documents = documents
        self.max_tokens = max_tokens
        self.seed = seed
        self.shuffle = shuffle
        # Draw 0 decides, once, which documents of equal length meet; draw e + 1 is the order of epoch e.
        order_D = _permutation(len(lengths_D), seed, 0) if shuffle else np.arange(len(lengths_D))
        sequence_D = np.empty(len(lengths_D), dtype=np.int64)
        sequence_D[order_D] = best_fit(lengths_D[order_D], max_tokens)
        self._members = np.argsort(sequence_D, kind="stable")
        counts = np.bincount(sequence_D)
        self._borders = np.concatenate([[0], np.cumsum(counts)])
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._borders) - 1

    @property
    def fill(self) -> float:
        """The share of all sequences' capacity that holds tokens."""
        return len(self.documents.tokens_N) / (len(self) * self.max_tokens)

    def members(self, sequence: int) -> np.ndarray:
        """The documents of one sequence, by their number."""
        return self._members[self._borders[sequence] : self._borders[sequence + 1]]

    def batch(self, sequences: Sequence[int] | np.ndarray) -> Batch:
        """These sequences as the rows of one micro-batch."""
        return make_batch(self.documents, [self.members(sequence) for sequence in sequences])

    def width(self, sequences: Iterable[int] | np.ndarray) -> int:
        """Tokens of the longest of these sequences: the columns of their batch."""
        return max(int(self.documents.lengths_D[self.members(each)].sum()) for each in sequences)

    def tokens(self, micro_batches: Iterable[np.ndarray]) -> int:
        """Of the documents of these sequences, padding left out."""
        return sum(int(self.documents.lengths_D[self.members(each)].sum()) for each in _all(micro_batches))

    def targets(self, micro_batches: Iterable[np.ndarray]) -> int:
        """What a step on these sequences is divided by: the tokens with a label, 1 where there are none."""
        documents = (document for each in _all(micro_batches) for document in self.members(each))
        return max(1, sum(int(self.documents.targets(document)[1:].sum()) for document in documents))

    def order(self, epoch: int) -> np.ndarray:
        """The sequences in the order of one epoch."""
        if not self.shuffle:
            return np.arange(len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _permutation(len(self), self.seed, epoch + 1))
        return self._order[1]

    def step_sequences(self, step: int, sequences_per_step: int, total: int) -> np.ndarray:
        """The sequences of optimizer step `step` (from 0), out of a training on `total` sequences.

        The epochs follow one another without a gap: a step may take the end of one and the beginning of the
        next. Only the last step may be shorter, so that every sequence is seen once per epoch. Raises
        ValueError for a step outside the training.
        """
        start, stop = step * sequences_per_step, min((step + 1) * sequences_per_step, total)
        if not 0 <= start < stop:
            raise ValueError(f"step {step} of {sequences_per_step} sequences lies outside a training on {total}")
        places = np.arange(start, stop)
        epochs = places // len(self)
        return np.concatenate(
            [self.order(int(epoch))[places[epochs == epoch] % len(self)] for epoch in np.unique(epochs)]
        )


def _all(micro_batches: Iterable[np.ndarray]) -> Iterator[int]:
    return (int(sequence) for rows in micro_batches for sequence in rows)


def best_fit(lengths_D: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each length: longest first, each into the fullest bin that still holds it.

    Returns [D] int64, bins numbered in the order in which they were opened. Takes about D·log(capacity) time.
    """
    bins_D = np.empty(len(lengths_D), dtype=np.int64)
    open_bins: dict[int, list[int]] = {}  # by the room left, the latest last: it goes first
    rooms: list[int] = []  # the keys of open_bins, sorted
    opened = 0
    for document in np.argsort(-lengths_D, kind="stable").tolist():
        length = int(lengths_D[document])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = opened, capacity
            opened += 1
        else:
            room = rooms[place]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[place]
        bins_D[document] = chosen
        if room > length:
            left = open_bins.setdefault(room - length, [])
            if not left:
                insort(rooms, room - length)
            left.append(chosen)
    return bins_D


def _permutation(size: int, seed: int, draw: int) -> np.ndarray:
    """A permutation from raw 64-bit draws, whose stream, unlike shuffles, no version of numpy changes."""
    draws = np.random.PCG64(np.random.SeedSequence([seed, draw])).random_raw(size)
    return np.argsort(draws, kind="stable")
