"""Packs whole documents into sequences of at most `max_tokens`, and orders the sequences for training.

Documents are packed once, by best fit in order of decreasing length. Only the order of the sequences changes from
epoch to epoch: it is a permutation that depends on (seed, epoch) alone. So the data of a step follows from its
number, and a resumed run continues exactly where it stopped without any saved state.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from stillhouse.data.documents import Documents
from stillhouse.data.micro_batch import MicroBatch, StepMicroBatches, make_micro_batch


class PackedSequences:
    """The documents as packed sequences, numbered 0 to len-1.

    max_tokens: capacity of a sequence. seed: decides the order of the sequences, and the order in which documents of
    equal length are packed. shuffle=False: keep the given order of both (for evaluation).
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
        # Draw 0 orders documents of equal length for packing, once; draw e + 1 is the order of epoch e.
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
        """The share of all sequences' capacity that is filled with tokens."""
        return len(self.documents.tokens_N) / (len(self) * self.max_tokens)

    def members(self, sequence: int) -> np.ndarray:
        """The numbers of the documents of one sequence."""
        return self._members[self._borders[sequence] : self._borders[sequence + 1]]

    def micro_batch(self, sequences: Sequence[int] | np.ndarray) -> MicroBatch:
        """These sequences as the rows of one micro-batch."""
        return make_micro_batch(self.documents, [self.members(sequence) for sequence in sequences])

    def micro_batches(self, rows: Sequence[np.ndarray]) -> "PackedMicroBatches":
        """Micro-batches of these sequences, one for each array of sequence numbers."""
        return PackedMicroBatches(self, rows)

    def order(self, epoch: int) -> np.ndarray:
        """The numbers of the sequences in the order of one epoch."""
        if not self.shuffle:
            return np.arange(len(self))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _permutation(len(self), self.seed, epoch + 1))
        return self._order[1]

    def step_sequences(self, step: int, sequences_per_step: int, total: int) -> np.ndarray:
        """The numbers of the sequences of optimizer step `step` (from 0), in a training on `total` sequences.

        A step may contain the end of one epoch and the beginning of the next. Only the last step may have fewer
        sequences. So every sequence is used once per epoch. Raises ValueError for a step outside the training.
        """
        start, stop = step * sequences_per_step, min((step + 1) * sequences_per_step, total)
        if not 0 <= start < stop:
            raise ValueError(f"step {step} of {sequences_per_step} sequences lies outside a training on {total}")
        positions = np.arange(start, stop)
        epochs = positions // len(self)
        return np.concatenate(
            [self.order(int(epoch))[positions[epochs == epoch] % len(self)] for epoch in np.unique(epochs)]
        )


class PackedMicroBatches(StepMicroBatches):
    """Micro-batches of packed sequences, each built when it is accessed.

    rows: for each micro-batch, the numbers of its sequences.
    """

    def __init__(self, sequences: PackedSequences, rows: Sequence[np.ndarray]):
        super().__init__(())
        self.sequences, self.rows = sequences, list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _build(self, number: int) -> MicroBatch:
        return self.sequences.micro_batch(self.rows[number])

    @property
    def shapes_BS(self) -> list[tuple[int, int]]:
        return [(len(each), max(self._lengths(each))) for each in self.rows]

    @property
    def tokens(self) -> int:
        return sum(sum(self._lengths(each)) for each in self.rows)

    @property
    def normalizer(self) -> int:
        documents = self.sequences.documents
        held = (document for each in self.rows for document in self.documents(each))
        return max(1, sum(int(documents.targets(document)[1:].sum()) for document in held))

    def document_tokens(self, document: int) -> np.ndarray:
        return self.sequences.documents.tokens(document)

    def documents(self, rows: np.ndarray) -> list[int]:
        """The numbers of the documents of some sequences."""
        return [document for sequence in rows for document in self.sequences.members(sequence).tolist()]

    def _lengths(self, rows: np.ndarray) -> list[int]:
        """The number of tokens of each of these sequences."""
        lengths_D = self.sequences.documents.lengths_D
        return [int(lengths_D[self.sequences.members(sequence)].sum()) for sequence in rows]


def best_fit(lengths_D: np.ndarray, capacity: int) -> np.ndarray:
    """Assign each length to a bin: the longest first, each to the fullest bin with enough room for it.

    Returns [D] int64, bins numbered in the order in which they were opened. Takes about D·log(capacity) time.
    """
    bins_D = np.empty(len(lengths_D), dtype=np.int64)
    # by the room that is left in the bins; of the bins with equal room, the last one is used first
    open_bins: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of open_bins, sorted
    opened = 0
    for document in np.argsort(-lengths_D, kind="stable").tolist():
        length = int(lengths_D[document])
        index = bisect_left(rooms, length)
        if index == len(rooms):
            chosen, room = opened, capacity
            opened += 1
        else:
            room = rooms[index]
            chosen = open_bins[room].pop()
            if not open_bins[room]:
                del open_bins[room], rooms[index]
        bins_D[document] = chosen
        if room > length:
            left = open_bins.setdefault(room - length, [])
            if not left:
                insort(rooms, room - length)
            left.append(chosen)
    return bins_D


def _permutation(size: int, seed: int, draw: int) -> np.ndarray:
    """A permutation from raw 64-bit draws: numpy keeps their stream the same in all versions, unlike its shuffles."""
    draws = np.random.PCG64(np.random.SeedSequence([seed, draw])).random_raw(size)
    return np.argsort(draws, kind="stable")
