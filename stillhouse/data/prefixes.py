"""Prefixes of documents, as tokens. A teacher reads its prefix before the document; the student does not read it.

A prefix is privileged context, such as the answer to a question. It is inserted before the document's tokens, and
does not change these tokens. So after each of them, student and teacher predict the same next token. If the document
begins with a BOS, the BOS stays before the prefix.

D documents; N tokens of all prefixes, concatenated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EncodedPrefix:
    """ids: token ids, [n] int32. after_bos: whether the document begins with a BOS, which stays before the prefix."""

    ids: np.ndarray
    after_bos: bool


@dataclass(frozen=True)
class Prefixes:
    """One teacher's prefixes of D documents, concatenated.

    tokens_N: int32.
    offsets: [D+1] int64, the prefix of document d is `offsets[d]:offsets[d+1]`.
    after_bos_D: bool, whether the document begins with a BOS, which stays before the prefix.
    """

    tokens_N: np.ndarray
    offsets: np.ndarray
    after_bos_D: np.ndarray

    @classmethod
    def of(cls, prefixes: Sequence[EncodedPrefix]) -> "Prefixes":
        """Concatenate the prefixes of documents."""
        return cls(
            np.concatenate([prefix.ids for prefix in prefixes]),
            offsets_of([len(prefix.ids) for prefix in prefixes]),
            np.asarray([prefix.after_bos for prefix in prefixes], dtype=bool),
        )

    @classmethod
    def joined(cls, parts: Sequence["Prefixes"]) -> "Prefixes":
        """Concatenate the prefixes of several sets of documents."""
        return cls(
            np.concatenate([part.tokens_N for part in parts]),
            offsets_of(np.concatenate([part.lengths_D for part in parts])),
            np.concatenate([part.after_bos_D for part in parts]),
        )

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens per prefix, int64."""
        return np.diff(self.offsets)

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of one document's prefix."""
        return self.tokens_N[self.offsets[document] : self.offsets[document + 1]]

    def before(self, document: int, ids: np.ndarray) -> np.ndarray:
        """All ids that the teacher reads: the document's BOS if it has one, the prefix, and the rest of `ids`.

        With or without a BOS, row i of the document is row `lengths_D[document] + i` of the teacher: both predict the
        document's token i + 1.
        """
        front = int(self.after_bos_D[document])
        return np.concatenate([ids[:front], self.tokens(document), ids[front:]])

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Prefixes":
        """The prefixes of the chosen documents, in the given order."""
        offsets, index_N = chosen_tokens(self.offsets, chosen)
        return Prefixes(self.tokens_N[index_N], offsets, self.after_bos_D[chosen])


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """The offsets of D consecutive parts with these lengths: [D+1] int64, part d is `offsets[d]:offsets[d+1]`."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def part_lengths(offsets: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The lengths of the chosen parts. Takes no time for the other parts."""
    return offsets[chosen + 1] - offsets[chosen]


def chosen_tokens(offsets: np.ndarray, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The offsets of the chosen parts after concatenation, and the index that each of their tokens had before."""
    numbers = np.asarray(chosen, dtype=np.int64)
    lengths = part_lengths(offsets, numbers)
    new_offsets = offsets_of(lengths)
    shift_N = np.repeat(offsets[numbers] - new_offsets[:-1], lengths)
    return new_offsets, np.arange(new_offsets[-1]) + shift_N
