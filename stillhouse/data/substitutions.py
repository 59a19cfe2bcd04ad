"""Substitutions: tokens that one teacher reads in place of spans of a document. The student does not read them.

There are two kinds. A prefix is privileged context, such as the answer to a question. It replaces an empty span at
the beginning of the document, or after the BOS if the document begins with a BOS. The second kind is for a teacher
with another vision tower: the tokens that its processor makes for media replace the student's tokens of these media.

All tokens outside of substitutions are the same for student and teacher. Only such tokens can be targets.

D documents; P substitutions of all documents; N tokens of all substitutions; S tokens of one document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np

from stillhouse.data.offsets import chosen_tokens, offsets_of


@dataclass(frozen=True)
class Substitution:
    """The ids, [n] int32, that a teacher reads in place of the tokens start:stop of a document."""

    start: int
    stop: int
    ids: np.ndarray

    @property
    def gain(self) -> int:
        """The number of tokens that the teacher reads minus the number that the student reads."""
        return len(self.ids) - (self.stop - self.start)


def piece_substitutions(
    prefixes: Mapping[str, Substitution], media: Mapping[str, Sequence[Substitution]], length: int, *, is_first: bool
) -> dict[str, list[Substitution]]:
    """A piece's substitutions, by teacher. length: the piece's tokens. Later pieces have no BOS before the prefix."""
    substitutions = {name: [item] if is_first else [Substitution(0, 0, item.ids)] for name, item in prefixes.items()}
    for name, items in media.items():
        within = [replace(item, stop=min(item.stop, length)) for item in items]
        substitutions[name] = [*substitutions.get(name, []), *within]
    return {name: [item for item in items if item.gain or len(item.ids)] for name, items in substitutions.items()}


@dataclass(frozen=True)
class Substitutions:
    """One teacher's substitutions in D documents, concatenated. Within a document they are in ascending order.

    tokens_N: int32, the tokens of all substitutions.
    offsets: [P+1] int64, the tokens of substitution p are `offsets[p]:offsets[p+1]`.
    spans_P2: int64, the span of the document that each substitution replaces.
    parts: [D+1] int64, the substitutions of document d are `parts[d]:parts[d+1]`.
    """

    tokens_N: np.ndarray
    offsets: np.ndarray
    spans_P2: np.ndarray
    parts: np.ndarray

    @classmethod
    def of(cls, documents: Sequence[Sequence[Substitution]]) -> Self:
        every = [item for items in documents for item in items]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(item.ids for item in every)]),
            offsets_of([len(item.ids) for item in every]),
            np.asarray([(item.start, item.stop) for item in every], dtype=np.int64).reshape(-1, 2),
            offsets_of([len(items) for items in documents]),
        )

    @classmethod
    def joined(cls, parts: Sequence["Substitutions"]) -> Self:
        """The substitutions of several sets of documents."""
        return cls(
            np.concatenate([part.tokens_N for part in parts]),
            offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
            np.concatenate([part.spans_P2 for part in parts]),
            offsets_of(np.concatenate([np.diff(part.parts) for part in parts])),
        )

    @cached_property
    def gains_D(self) -> np.ndarray:
        """For each document, the teacher's number of tokens minus the student's, int64. It can be negative."""
        gains_P = np.diff(self.offsets) - np.diff(self.spans_P2, axis=1)[:, 0]
        sums = offsets_of(gains_P)
        return sums[self.parts[1:]] - sums[self.parts[:-1]]

    def items(self, document: int) -> list[Substitution]:
        """The substitutions of one document."""
        part = slice(self.parts[document], self.parts[document + 1])
        places = zip(self.spans_P2[part].tolist(), self.offsets[part], self.offsets[1:][part], strict=True)
        return [Substitution(start, stop, self.tokens_N[first:end]) for (start, stop), first, end in places]

    def tokens(self, document: int, ids_S: np.ndarray) -> np.ndarray:
        """All ids that the teacher reads for a document. ids_S: the ids that the student reads."""
        pieces, done = [], 0
        for substitution in self.items(document):
            pieces += [ids_S[done : substitution.start], substitution.ids]
            done = substitution.stop
        return np.concatenate([*pieces, ids_S[done:]])

    def places(self, document: int, length: int) -> np.ndarray:
        """Each token's position among the teacher's tokens, [S] int64; -1 for a replaced token. length: S."""
        place_S = np.arange(length)
        for substitution in self.items(document):
            place_S[substitution.stop :] += substitution.gain
        for substitution in self.items(document):
            place_S[substitution.start : substitution.stop] = -1
        return place_S

    def rows(self, document: int, length: int) -> np.ndarray:
        """For each of the document's S rows, the teacher's row that predicts the same token, [S] int64. length: S.

        Row i predicts token i + 1. The result is -1 if no row of the teacher predicts this token, which is no target.
        """
        next_S = np.append(self.places(document, length)[1:], length + self.gains_D[document])
        return np.maximum(next_S, 0) - 1

    def is_substituted(self, offsets: np.ndarray) -> np.ndarray:
        """True for each token of all documents that a substitution replaces, bool. offsets: `Documents.offsets`."""
        starts_P2 = self.spans_P2 + np.repeat(offsets[:-1], np.diff(self.parts))[:, None]
        borders = np.zeros(offsets[-1] + 1, dtype=np.int32)
        np.add.at(borders, starts_P2[:, 0], 1)
        np.add.at(borders, starts_P2[:, 1], -1)
        return borders.cumsum()[:-1] > 0

    def select(self, chosen: Sequence[int] | np.ndarray) -> Self:
        """The substitutions in the chosen documents, in this order."""
        parts, index_P = chosen_tokens(self.parts, chosen)
        offsets, index_N = chosen_tokens(self.offsets, index_P)
        return type(self)(self.tokens_N[index_N], offsets, self.spans_P2[index_P], parts)
