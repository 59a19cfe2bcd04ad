"""Tokenized documents, in memory or memory-mapped from `token_cache.py`. `document_loader.py` creates them.

D documents; N tokens of all documents, concatenated.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from stillhouse.data.data_report import DataReport
from stillhouse.data.media_files import MediaFile, MediaFiles
from stillhouse.data.offsets import chosen_tokens, offsets_of
from stillhouse.data.record import DataError
from stillhouse.data.substitutions import Substitutions

#: the number of documents whose targets are counted at once; it limits the memory for counting
_COUNTED_TOGETHER = 4096


@dataclass(frozen=True)
class Documents:
    """D tokenized documents, concatenated.

    tokens_N: int32, token ids.
    targets_N: bool, True for targets. The first token of a document is never a target.
    offsets: [D+1] int64, document d is `offsets[d]:offsets[d+1]`.
    keys_D: uint64, a hash of the record's content. All pieces of a text have the same hash.
    sources: `file:line` of each document.
    columns: additional columns of the records, one value per document.
    substitutions: each teacher's substitutions, by the teacher's name; a single teacher has the name "".
    records: the record of each document; empty if records are not kept.
    per_token: additional numbers per token, [N] float32, by name.
    weights_N: float32, the weights of the targets, above 0. If it is None, all weights are 1.
    set_D: int64, the number of each document's set (a weighted source or an evaluation set); None without sets.
    reports: the report of each set by the set's name, in the order of the set numbers.
    media: the encoded media of the documents; None if no document has any.
    """

    tokens_N: np.ndarray
    targets_N: np.ndarray
    offsets: np.ndarray
    keys_D: np.ndarray
    sources: Sequence[str]
    report: DataReport
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    substitutions: Mapping[str, Substitutions] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights_N: np.ndarray | None = None
    set_D: np.ndarray | None = None
    reports: Mapping[str, DataReport] = field(default_factory=dict)
    media: MediaFiles | None = None

    @classmethod
    def joined(cls, parts: Mapping[str, "Documents"]) -> "Documents":
        """Concatenate the documents of several sets. parts: the documents of each set, by the set's name."""
        sets = list(parts.values())
        return replace(
            cls.concatenated(sets, DataReport.total([documents.report for documents in sets])),
            set_D=np.repeat(np.arange(len(sets)), [len(documents) for documents in sets]),
            reports={name: documents.report for name, documents in parts.items()},
        )

    @classmethod
    def concatenated(cls, parts: Sequence["Documents"], report: DataReport) -> "Documents":
        """Concatenate documents with the same columns and the same arrays per token."""
        first, weights = parts[0], [part.weights_N for part in parts if part.weights_N is not None]
        assert len(weights) in (0, len(parts))
        media = [part.media or MediaFiles.none(len(part)) for part in parts]
        return cls(
            np.concatenate([part.tokens_N for part in parts]),
            np.concatenate([part.targets_N for part in parts]),
            offsets_of(np.concatenate([part.lengths_D for part in parts])),
            np.concatenate([part.keys_D for part in parts]),
            [source for part in parts for source in part.sources],
            report,
            {name: [value for part in parts for value in part.columns[name]] for name in first.columns},
            {
                name: Substitutions.joined([part.substitutions_of(name) for part in parts])
                for name in dict.fromkeys(name for part in parts for name in part.substitutions)
            },
            [record for part in parts for record in part.records] if all(part.records for part in parts) else (),
            {name: np.concatenate([part.per_token[name] for part in parts]) for name in first.per_token},
            np.concatenate(weights) if weights else None,
            media=MediaFiles.joined(media) if any(part.media for part in parts) else None,
        )

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens per document, int64."""
        return np.diff(self.offsets)

    def part(self, values_N: np.ndarray, document: int) -> np.ndarray:
        """The slice of an array [N] that belongs to one document."""
        return values_N[self.offsets[document] : self.offsets[document + 1]]

    def tokens(self, document: int) -> np.ndarray:
        return self.part(self.tokens_N, document)

    def targets(self, document: int) -> np.ndarray:
        return self.part(self.targets_N, document)

    def substitutions_of(self, teacher: str) -> Substitutions:
        if teacher in self.substitutions:
            return self.substitutions[teacher]
        return replace(Substitutions.of([]), parts=np.zeros(len(self) + 1, dtype=np.int64))

    def media_of(self, document: int) -> list[MediaFile]:
        return [] if self.media is None else self.media.of(document)

    @property
    def has_media(self) -> bool:
        return self.media is not None and bool(self.media.offsets[-1])

    @cached_property
    def target_counts_D(self) -> np.ndarray:
        """The number of targets of each document, int64. The first access reads all targets."""
        counts_D = np.empty(len(self), dtype=np.int64)
        for first in range(0, len(self), _COUNTED_TOGETHER):
            borders = np.asarray(self.offsets[first : first + _COUNTED_TOGETHER + 1])
            before_N = offsets_of(self.targets_N[borders[0] : borders[-1]])
            starts, stops = np.minimum(borders[:-1] + 1, borders[1:]), borders[1:]
            counts_D[first : first + len(stops)] = before_N[stops - borders[0]] - before_N[starts - borders[0]]
        return counts_D

    def widths(self, teachers: Sequence[str], chosen: np.ndarray) -> np.ndarray:
        """The largest number of tokens that the student or one of these teachers reads, for each chosen document."""
        gains = [self.substitutions[name].gains_D[chosen] for name in teachers if name in self.substitutions]
        lengths = self.offsets[chosen + 1] - self.offsets[chosen]
        return lengths + np.max([np.zeros(len(chosen), np.int64), *gains], axis=0)

    def as_read_by(self, teacher: str) -> "Documents":
        """The documents with the tokens that this teacher reads; this object if the teacher has no substitutions."""
        if teacher not in self.substitutions or not len(self):
            return self
        substitutions, tokens, targets = self.substitutions[teacher], [], []
        for document in range(len(self)):
            student_targets = self.targets(document)
            tokens.append(substitutions.tokens(document, self.tokens(document)))
            targets.append(np.zeros(len(tokens[-1]), dtype=bool))
            targets[-1][substitutions.places(document, len(student_targets))[student_targets]] = True
        return replace(
            self,
            tokens_N=np.concatenate(tokens),
            targets_N=np.concatenate(targets),
            offsets=offsets_of([len(ids) for ids in tokens]),
            per_token={},
            weights_N=None,
        )

    def fingerprint(self) -> str:
        """A sha256 of tokens, targets, substitutions, sets, media, columns and records. A resumed run compares it."""
        digest = hashlib.sha256()
        arrays = [self.tokens_N, self.targets_N, self.offsets]
        for substitutions in (self.substitutions[name] for name in sorted(self.substitutions)):
            arrays += [substitutions.tokens_N, substitutions.offsets, substitutions.spans_P2, substitutions.parts]
        if self.set_D is not None:
            arrays.append(self.set_D)
        if self.media is not None:
            arrays += [self.media.offsets, np.frombuffer(self.media.hashes(), dtype=np.uint8)]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        if self.columns or self.substitutions or self.records:
            kept: list[Any] = [sorted(self.substitutions), sorted(self.columns.items())]
            kept += [list(self.records)] if self.records else []
            digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Documents":
        """The chosen documents in this order, with new counts in the reports."""
        chosen = np.asarray(chosen, dtype=np.int64)
        offsets, index_N = chosen_tokens(self.offsets, chosen)
        set_D = None if self.set_D is None else self.set_D[chosen]
        return Documents(
            self.tokens_N[index_N],
            self.targets_N[index_N],
            offsets,
            self.keys_D[chosen],
            [self.sources[document] for document in chosen],
            self._counted(self.report, chosen),
            {name: [values[document] for document in chosen] for name, values in self.columns.items()},
            {name: substitutions.select(chosen) for name, substitutions in self.substitutions.items()},
            [self.records[document] for document in chosen] if self.records else (),
            {name: values_N[index_N] for name, values_N in self.per_token.items()},
            None if self.weights_N is None else self.weights_N[index_N],
            set_D,
            {name: self._counted(self.reports[name], chosen[set_D == at]) for at, name in enumerate(self.reports)},
            None if self.media is None else self.media.select(chosen),
        )

    def _counted(self, report: DataReport, chosen: Sequence[int] | np.ndarray) -> DataReport:
        _, index_N = chosen_tokens(self.offsets, chosen)
        sources = [self.sources[document] for document in chosen]
        return report.counted(sources, len(index_N), self.targets_N[index_N].sum())

    def split(self, share: float) -> tuple["Documents", "Documents"]:
        """Split the documents into (train, evaluation).

        A document is held out for the evaluation if the hash of its record's content, scaled to 0 … 1, is below
        `share`. So the split does not depend on the order of the records or on the tokenizer, and documents with
        equal contents are in the same part. Neither part is empty. Raises ValueError if `share` is not in (0, 1), or
        if all documents have the same content.
        """
        if not 0 < share < 1:
            raise ValueError(f"the share of held-out documents must lie between 0 and 1, got {share}")
        smallest, largest = self.keys_D.min(), self.keys_D.max()
        if smallest == largest:
            raise ValueError(
                f"{self.report.source}: all documents have the same content, so none can be held out for evaluation; "
                "expected different records, a separate file for the evaluation, or no evaluation"
            )
        held_out_D = self.keys_D < np.uint64(int(share * 2**64))
        held_out_D |= self.keys_D == smallest
        held_out_D &= self.keys_D != largest
        train, evaluation = self.select(np.flatnonzero(~held_out_D)), self.select(np.flatnonzero(held_out_D))
        # Only the report of the training documents counts the read, cut and skipped records of the source.
        report = evaluation._counted(DataReport(f"{share:g} of {self.report.source}"), range(len(evaluation)))
        return train, replace(evaluation, report=report, set_D=None, reports={})

    def overlap(self, other: "Documents") -> int:
        """The number of these documents whose record has the same content as a record of `other`."""
        return int(np.isin(self.keys_D, other.keys_D).sum())

    def check_ids(self, rows: int, which: str, teachers: Sequence[str] = ()) -> None:
        """Raise DataError for the first document with a token id ≥ `rows`, the number of rows of a model's head.

        which: the model's name in the error. teachers: the names of the teachers that run this model. Their
        substitutions are checked, too. A token that the substitutions of all these teachers replace is not checked.
        """
        substitutions = {name: self.substitutions[name] for name in teachers if name in self.substitutions}
        is_beyond_N = self.tokens_N >= rows
        if substitutions and is_beyond_N.any():
            by_teacher = [replaced.is_substituted(self.offsets) for replaced in substitutions.values()]
            is_beyond_N &= ~np.logical_and.reduce(by_teacher)
        beyond = [
            (int(np.searchsorted(self.offsets, at, side="right")) - 1, self.tokens_N[at], "")
            for at in np.flatnonzero(is_beyond_N)[:1]
        ]
        for name, replaced in substitutions.items():
            for at in np.flatnonzero(replaced.tokens_N >= rows)[:1]:
                part = np.searchsorted(replaced.offsets, at, side="right") - 1
                document = int(np.searchsorted(replaced.parts, part, side="right")) - 1
                what = "images" if np.diff(replaced.spans_P2[part]) else "prefix"
                where = f" of the {what} of teacher {name!r}" if name else f" of the teacher's {what}"
                beyond.append((document, replaced.tokens_N[at], where))
        for document, token, where in beyond[:1]:
            reason = f"token id {token}{where} has no row in the {which}'s head of {rows} rows"
            raise DataError(self.sources[document], reason)
