"""Packs documents, without splitting them, into sequences of at most `max_tokens`, and orders the sequences.

Documents are packed once, by best fit in order of decreasing length, or so that each sequence has documents of
similar lengths. Only the order of the sequences changes from epoch to epoch. It is a permutation that depends only on
(seed, epoch). So the number of a step determines its data, and a resumed run continues exactly where it stopped,
without any saved state of the data.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from stillhouse.data.documents import Documents
from stillhouse.data.media import DocumentMedia, MediaInputs
from stillhouse.data.micro_batch import MicroBatch, StepMicroBatches
from stillhouse.data.offsets import offsets_of
from stillhouse.data.packed_rows import make_micro_batch

#: the name of the teacher in a run with only one teacher
SINGLE = ""


class PackedSequences:
    """The documents as packed sequences, numbered 0 to len-1.

    seed: determines the order of the sequences, and the order in which documents of equal length are packed.
    shuffle: False keeps the order of the documents and of the sequences (for evaluation).
    gaps: names of teachers in this job. The columns of a document also have room for the tokens that these teachers
        read (see `packed_rows.py`). The name "" is a run's only teacher; all micro-batches have its `teacher_inputs`.
    together: the name of a column. Documents share a sequence only if they have the same value in this column.
        Documents of different sets never share a sequence.
    weights: the share of each set in all tokens of the training. If it is None, every sequence is used once per
        epoch.
    by_length: whether a sequence has documents of similar lengths, for models that run each document in a padded row
        of its own. A sequence then has at most `max_tokens` tokens including the padding of these rows.
    media_inputs: see `make_micro_batch`.

    set_S: int64, the set of each sequence; 0 if there are no sets.
    widths_D, widths_S: int64, the columns of each document (its gap and its tokens), and of each sequence.
    tokens_S: int64, the tokens of each sequence, without gaps.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        max_tokens: int,
        seed: int,
        shuffle: bool = True,
        gaps: Sequence[str] = (),
        together: str | None = None,
        weights: Sequence[float] | None = None,
        by_length: bool = False,
        media_inputs: MediaInputs | None = None,
    ):
        widths_D = documents.widths(gaps, np.arange(len(documents)))
        if len(widths_D) == 0 or widths_D.max() > max_tokens:
            what = f"{max_tokens} tokens{' for every teacher' if (widths_D > documents.lengths_D).any() else ''}"
            raise ValueError(
                f"expected one or more documents of at most {what} to pack, "
                f"got {len(widths_D)} documents of at most {widths_D.max(initial=0)}"
            )
        self.documents, self.gaps, self.widths_D, self.by_length = documents, tuple(gaps), widths_D, by_length
        self.together, self.media_inputs = together, media_inputs
        self.max_tokens, self.seed, self.shuffle, self.weights = max_tokens, seed, shuffle, weights
        # Permutation 0 orders documents of equal length for packing; permutation e + 1 is the order of epoch e.
        order_D = permutation(len(widths_D), seed, 0) if shuffle else np.arange(len(widths_D))
        kind_D = np.zeros(len(widths_D), dtype=np.int64)
        if together is not None:
            kind_D = np.unique([str(value) for value in documents.columns[together]], return_inverse=True)[1]
        set_D = np.zeros_like(kind_D) if documents.set_D is None else documents.set_D
        group_D = kind_D * (set_D.max() + 1) + set_D
        sequence_D = np.empty(len(widths_D), dtype=np.int64)
        opened, fit = 0, similar_fit if by_length else best_fit
        for group in np.unique(group_D):
            members = order_D[group_D[order_D] == group]
            sequence_D[members] = opened + fit(widths_D[members], max_tokens)
            opened = int(sequence_D[members].max()) + 1
        self._members = np.argsort(sequence_D, kind="stable")
        self._borders = offsets_of(np.bincount(sequence_D))
        first_S = self._members[self._borders[:-1]]
        self._kinds, self.set_S = kind_D[first_S], set_D[first_S]
        self.widths_S = np.add.reduceat(widths_D[self._members], self._borders[:-1])
        self.tokens_S = np.add.reduceat(documents.lengths_D[self._members], self._borders[:-1])
        self._weighted_order = np.empty(0, dtype=np.int64)

    def sorted_by_length(self, max_tokens: int) -> "PackedSequences":
        """The same documents, packed by similar length into sequences of another capacity."""
        names = ("documents", "seed", "shuffle", "gaps", "together", "weights", "media_inputs")
        kept = {name: getattr(self, name) for name in names}
        return PackedSequences(**kept, max_tokens=max_tokens, by_length=True)

    def with_media_inputs(self, media_inputs: MediaInputs) -> "PackedSequences":
        """The same sequences, with these inputs of media in their micro-batches."""
        other = copy(self)
        other.media_inputs = media_inputs
        return other

    def __len__(self) -> int:
        return len(self._borders) - 1

    @cached_property
    def targets_S(self) -> np.ndarray:
        """The number of targets of each sequence, int64. The first access reads all targets."""
        return np.add.reduceat(self.documents.target_counts_D[self._members], self._borders[:-1])

    @property
    def filled_share(self) -> float:
        """Tokens and gaps of all sequences, as a share of the sequences' capacity of `max_tokens` columns each."""
        return int(self.widths_D.sum()) / (len(self) * self.max_tokens)

    @property
    def padding_share(self) -> float:
        """The share of padding if each document of a sequence is padded to the sequence's longest document."""
        longest_S = np.maximum.reduceat(self.widths_D[self._members], self._borders[:-1])
        return 1 - int(self.widths_D.sum()) / int((longest_S * np.diff(self._borders)).sum())

    def members(self, sequence: int) -> np.ndarray:
        """The numbers of the documents of one sequence."""
        return self._members[self._borders[sequence] : self._borders[sequence + 1]]

    def micro_batch(self, sequences: Sequence[int] | np.ndarray, teacher: str | None = None) -> MicroBatch:
        """These sequences as rows of a micro-batch. teacher: one of `gaps`, the teacher of the `teacher_inputs`."""
        rows = [self.members(sequence) for sequence in sequences]
        return make_micro_batch(self.documents, rows, self.gaps, teacher, self.media_inputs)

    def micro_batches(self, rows: Sequence[np.ndarray]) -> "PackedMicroBatches":
        return PackedMicroBatches(self, rows, self.teacher_with_inputs(SINGLE))

    def teacher_with_inputs(self, name: str) -> str | None:
        """The name, if this teacher runs in this job and reads other tokens or media than the student; else None."""
        has_media = self.media_inputs is not None and name in self.media_inputs.teachers
        return name if name in self.gaps and (has_media or name in self.documents.substitutions) else None

    def order(self, epoch: int) -> np.ndarray:
        """The numbers of the sequences in the order of one epoch."""
        return permutation(len(self), self.seed, epoch + 1) if self.shuffle else np.arange(len(self))

    def step_sequences(self, step: int, sequences_per_step: int, total: int) -> np.ndarray:
        """The numbers of the sequences of optimizer step `step` (from 0), for a training on `total` sequences.

        Without weights, every sequence is used once per epoch, and a step may contain the end of one epoch and the
        beginning of the next. Only the last step can have fewer sequences. Within a step, sequences with the same
        value in `together` are adjacent. Raises ValueError for a step outside the training.
        """
        start, stop = step * sequences_per_step, min((step + 1) * sequences_per_step, total)
        if not 0 <= start < stop:
            raise ValueError(
                f"step {step} of {sequences_per_step} sequences lies outside a training on {total} sequences"
            )
        positions = np.arange(start, stop)
        if self.weights is not None:
            chosen = self.weighted_order(total)[positions]
        else:
            epochs = positions // len(self)
            chosen = np.concatenate(
                [self.order(int(epoch))[positions[epochs == epoch] % len(self)] for epoch in np.unique(epochs)]
            )
        return chosen[np.argsort(self._kinds[chosen], kind="stable")]

    def weighted_order(self, total: int) -> np.ndarray:
        """The result of the function `weighted_order` for these sequences. The last result is kept."""
        assert self.weights is not None
        if len(self._weighted_order) != total:
            self._weighted_order = weighted_order(self.set_S, self.tokens_S, self.weights, total, self.seed)
        return self._weighted_order

    def trained_shares(self, total: int) -> np.ndarray:
        """The share of each weighted source in all tokens of a training on `total` sequences."""
        chosen = self.weighted_order(total)
        tokens = np.bincount(self.set_S[chosen], weights=self.tokens_S[chosen], minlength=len(self.weights or ()))
        return tokens / tokens.sum()


class PackedMicroBatches(StepMicroBatches):
    """Micro-batches of packed sequences. Each micro-batch is built when it is accessed.

    rows: for each micro-batch, the numbers of its sequences. teacher: see `PackedSequences.micro_batch`.
    """

    def __init__(self, sequences: PackedSequences, rows: Sequence[np.ndarray], teacher: str | None = None):
        super().__init__(())
        self.sequences, self.rows, self.teacher = sequences, list(rows), teacher

    def __len__(self) -> int:
        return len(self.rows)

    def _build(self, number: int) -> MicroBatch:
        return self.sequences.micro_batch(self.rows[number], self.teacher)

    @property
    def shapes_BS(self) -> list[tuple[int, int]]:
        widths_S = self.sequences.widths_S
        return [(len(rows), int(widths_S[rows].max())) for rows in self.rows]

    @property
    def tokens(self) -> int:
        return int(self.sequences.tokens_S[np.concatenate(self.rows)].sum())

    @property
    def targets(self) -> int:
        return int(self.sequences.targets_S[np.concatenate(self.rows)].sum())

    def document_tokens(self, document: int) -> np.ndarray:
        return self.sequences.documents.tokens(document)

    def document_media(self, document: int) -> DocumentMedia | None:
        inputs = self.sequences.media_inputs
        return None if inputs is None else inputs.of(self.sequences.documents, document)

    def documents_of(self, number: int) -> list[int]:
        return [document for sequence in self.rows[number] for document in self.sequences.members(sequence).tolist()]

    def value(self, document: int, column: str) -> Any:
        return self.sequences.documents.columns[column][document]

    def for_teacher(self, name: str) -> "PackedMicroBatches":
        teacher = self.sequences.teacher_with_inputs(name)
        return self if teacher == self.teacher else PackedMicroBatches(self.sequences, self.rows, teacher)

    def teacher_tokens(self, document: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        ids, substitutions = self.document_tokens(document), self.sequences.documents.substitutions.get(name)
        if substitutions is None:
            return super().teacher_tokens(document, name)
        return substitutions.tokens(document, ids), substitutions.rows(document, len(ids))


def similar_fit(lengths_D: np.ndarray, capacity: int) -> np.ndarray:
    """Assign lengths to bins of similar lengths: in decreasing order, the lengths fill one bin after another.

    A bin is full if its lengths, each padded to the longest, leave no room for one more. Returns the bins, [D].
    """
    bins_D = np.empty(len(lengths_D), dtype=np.int64)
    last, left, longest = -1, 0, 0
    for document in np.argsort(-lengths_D, kind="stable").tolist():
        if left < longest or last < 0:
            last, left, longest = last + 1, capacity, int(lengths_D[document])
        bins_D[document], left = last, left - longest
    return bins_D


def best_fit(lengths_D: np.ndarray, capacity: int) -> np.ndarray:
    """Assign lengths to bins, the longest length first. Each length goes into the fullest bin that has room for it.

    Returns the bins, [D] int64, numbered in the order in which they are opened. Takes O(D·log(capacity)).
    """
    bins_D = np.empty(len(lengths_D), dtype=np.int64)
    # the bins by their remaining room; of the bins with equal room, the last bin in the list is used first
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


def weighted_order(
    source_S: np.ndarray, tokens_S: np.ndarray, weights: Sequence[float], total: int, seed: int
) -> np.ndarray:
    """The numbers of the sequences of a training on `total` sequences, [total] int64.

    A weight, above 0, is a share of the tokens. A source's share s of the sequences is therefore proportional to its
    weight divided by the mean number of tokens of its sequences. The k-th sequence of a source (from 0) gets the time
    (k + 1/2) / s, and the sequences of all sources are sorted by these times, so that each step has nearly the right
    shares. When all sequences of a source are used, the source begins again in another order. A longer training
    begins with the order of a shorter training. Raises ValueError if a source has no sequence.
    """
    members = [np.flatnonzero(source_S == number) for number in range(len(weights))]
    if empty := [number for number, sequences in enumerate(members) if not len(sequences)]:
        raise ValueError(f"source number {empty[0] + 1} of the mixture has no documents to train on")
    rates = np.array([weight / tokens_S[of].mean() for weight, of in zip(weights, members, strict=True)])
    shares = rates / rates.sum()
    # Up to time t, a source has at least t·share - 1/2 sequences. So the first `total` sequences of all sources come
    # before the time total + len(weights), and these counts are enough up to this time.
    counts = np.ceil((total + len(weights)) * shares).astype(np.int64) + 1
    times = np.concatenate([(np.arange(count) + 0.5) / share for count, share in zip(counts, shares, strict=True)])
    sequences = []
    for numbers, count in zip(members, counts.tolist(), strict=True):  # each epoch of a source has another order
        orders = [permutation(len(numbers), seed, epoch + 1) for epoch in range(-(-count // len(numbers)))]
        sequences.append(numbers[np.concatenate(orders)[:count]])
    return np.concatenate(sequences)[np.argsort(times, kind="stable")[:total]]


@lru_cache(maxsize=8)
def permutation(size: int, seed: int, number: int) -> np.ndarray:
    """Permutation `number` of a seed. It is made from raw 64-bit integers, because all versions of numpy generate the
    same integers, but not the same shuffles. The result is cached and must not be modified.
    """
    sort_keys = np.random.PCG64(np.random.SeedSequence([seed, number])).random_raw(size)
    order = np.argsort(sort_keys, kind="stable")
    order.flags.writeable = False
    return order
