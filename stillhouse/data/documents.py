"""Tokenized documents in memory, and a report on the records they were made from (`loading.py`).

D documents; N tokens of all documents, concatenated.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from stillhouse.data.prefixes import Prefixes, chosen_tokens, offsets_of
from stillhouse.data.reading import DataError
from stillhouse.display import escaped

_PIECE = re.compile(r" \(piece \d+ of \d+\)$")


def piece_source(where: str, number: int, count: int) -> str:
    """The source of piece `number` (from 0) of the record at `where`, which has `count` pieces."""
    return f"{where} (piece {number + 1} of {count})" if count > 1 else where


def count_records(sources: Iterable[str]) -> int:
    """The number of different records. sources: of documents, which may be pieces of records."""
    return len({_PIECE.sub("", source) for source in sources})


@dataclass
class DataReport:
    """How many records were used, cut or skipped: `read` = `kept` + `skipped` + `without_target`."""

    source: str
    form: str = ""  # how columns of another project were read; "" for our own columns
    read: int = 0
    kept: int = 0
    skipped: int = 0  # records that could not be used; `reasons` has the errors of the first few
    without_target: int = 0  # records without a target token, maybe because the end was cut off
    cut_documents: int = 0  # documents shortened to the limit
    cut_tokens: int = 0  # tokens lost by shortening
    split_documents: int = 0  # texts cut into pieces, without loss
    documents: int = 0  # each piece counts as one
    records: int = 0  # each record counts once, however many pieces it has
    tokens: int = 0
    target_tokens: int = 0
    joined_turns: int = 0  # turns whose first token begins in the prompt, as the tokenizer joins the two
    trained_share: float | None = None  # of a source in a mixture: its part of all tokens that the run trains on
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def total(cls, reports: Sequence["DataReport"]) -> "DataReport":
        """The counts of several sources together."""
        found = cls(" + ".join(each.source for each in reports))
        for each in reports:
            for name, value in asdict(each).items():
                if name not in ("source", "form", "trained_share"):
                    setattr(found, name, getattr(found, name) + value)
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for the reader of a log; counts that are zero are left out."""
        pieces = f" in {self.documents:,} pieces" if self.documents > self.records else ""
        parts = [
            f"{self.records:,} documents{pieces}",
            f"{self.tokens:,} tokens",
        ]
        if self.target_tokens:
            parts.append(f"{self.target_tokens:,} to predict")
        if self.cut_documents:
            parts.append(f"{self.cut_documents:,} cut at the limit ({self.cut_tokens:,} tokens lost)")
        if self.without_target:
            parts.append(f"{self.without_target:,} dropped with nothing to predict")
        if self.joined_turns:
            parts.append(f"{self.joined_turns:,} turns begin within a token of their prompt")
        if self.trained_share is not None:
            parts.append(f"{self.trained_share:.1%} of the tokens to train on")
        if self.form:
            parts.append(self.form)
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped, the first: {self.reasons[0]}")
        return escaped(f"{self.source}: {', '.join(parts)}")


@dataclass(frozen=True)
class Documents:
    """D tokenized documents, concatenated.

    tokens_N: int32. targets_N: bool, whether a token is to be predicted; False for the first token of a document.
    offsets: [D+1] int64, document d is `offsets[d]:offsets[d+1]`. keys_D: uint64, a hash of the record's content,
    the same for all pieces of one text. sources: `file:line` of each document. columns: further columns of the
    records, one value per document. prefixes: by teacher, what it reads in front of each document. records: the whole
    record of each document, or empty. per_token: further numbers of each token, [N] float32. weights_N: of the
    targets, float32, above 0; None: 1 each. set_D: int64, which of several sets a document belongs to, or None.
    reports: of the sets, by their names, in the order of their numbers.
    """

    tokens_N: np.ndarray
    targets_N: np.ndarray
    offsets: np.ndarray
    keys_D: np.ndarray
    sources: Sequence[str]
    report: DataReport
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    prefixes: Mapping[str, Prefixes] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights_N: np.ndarray | None = None
    set_D: np.ndarray | None = None
    reports: Mapping[str, DataReport] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Mapping[str, "Documents"]) -> "Documents":
        """The documents of several sets, by the sets' names, one set after the other.

        All have the same columns and teachers with prefixes. Numbers of each token (`per_token`, `weights_N`), which
        are given to documents later, are not joined.
        """
        documents = list(parts.values())
        first = documents[0]
        return cls(
            np.concatenate([each.tokens_N for each in documents]),
            np.concatenate([each.targets_N for each in documents]),
            offsets_of(np.concatenate([each.lengths_D for each in documents])),
            np.concatenate([each.keys_D for each in documents]),
            [source for each in documents for source in each.sources],
            DataReport.total([each.report for each in documents]),
            {name: [value for each in documents for value in each.columns[name]] for name in first.columns},
            {name: Prefixes.joined([each.prefixes[name] for each in documents]) for name in first.prefixes},
            [record for each in documents for record in each.records],
            set_D=np.repeat(np.arange(len(parts)), [len(each) for each in documents]),
            reports={name: each.report for name, each in parts.items()},
        )

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens per document, int64."""
        return np.diff(self.offsets)

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of one document."""
        return self.part(self.tokens_N, document)

    def part(self, values_N: np.ndarray, document: int) -> np.ndarray:
        """One document's part of an array over all tokens."""
        return values_N[self.offsets[document] : self.offsets[document + 1]]

    def targets(self, document: int) -> np.ndarray:
        """Which tokens of one document are to be predicted."""
        return self.part(self.targets_N, document)

    def gaps_D(self, teachers: Sequence[str]) -> np.ndarray:
        """The longest prefix of each document over these teachers, in tokens, int64; 0 without a prefix."""
        lengths = [self.prefixes[name].lengths_D for name in teachers if name in self.prefixes]
        return np.max([np.zeros(len(self), dtype=np.int64), *lengths], axis=0)

    def as_read_by(self, teacher: str) -> "Documents":
        """The documents with this teacher's prefixes as part of them; the same documents if it has none."""
        if teacher not in self.prefixes or not len(self):
            return self
        prefixes = self.prefixes[teacher]
        tokens = [prefixes.before(document, self.tokens(document)) for document in range(len(self))]
        # neither a prefix nor the BOS in front of it is a target
        targets = [
            np.concatenate([np.zeros(len(ids) - self.lengths_D[document], dtype=bool), self.targets(document)])
            for document, ids in enumerate(tokens)
        ]
        offsets = offsets_of([len(each) for each in tokens])
        return replace(
            self,
            tokens_N=np.concatenate(tokens),
            targets_N=np.concatenate(targets),
            offsets=offsets,
            per_token={},
            weights_N=None,
        )

    def fingerprint(self) -> str:
        """A sha256 of tokens, targets and offsets, and of the columns, prefixes and records, if there are any.

        A resumed run compares it with the one in its checkpoint.
        """
        digest = hashlib.sha256()
        arrays = [self.tokens_N, self.targets_N, self.offsets]
        for each in (self.prefixes[name] for name in sorted(self.prefixes)):
            arrays += [each.tokens_N, each.offsets, each.after_bos_D]
        if self.set_D is not None:
            arrays.append(self.set_D)
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
        if self.columns or self.prefixes or self.records:
            kept: list[Any] = [sorted(self.prefixes), sorted(self.columns.items())]
            kept += [list(self.records)] if self.records else []
            digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Documents":
        """The chosen documents, in the given order, with documents, tokens and targets in the report counted anew."""
        offsets, index_N = chosen_tokens(self.offsets, chosen)
        set_D = None if self.set_D is None else self.set_D[chosen]
        sources = [self.sources[document] for document in chosen]
        targets_N = self.targets_N[index_N]
        report = replace(
            self.report,
            documents=len(sources),
            records=count_records(sources),
            tokens=len(index_N),
            target_tokens=int(targets_N.sum()),
        )
        columns = {name: [values[document] for document in chosen] for name, values in self.columns.items()}
        prefixes = {name: each.select(chosen) for name, each in self.prefixes.items()}
        return Documents(
            self.tokens_N[index_N],
            targets_N,
            offsets,
            self.keys_D[chosen],
            sources,
            report,
            columns,
            prefixes,
            [self.records[document] for document in chosen] if self.records else (),
            {name: each_N[index_N] for name, each_N in self.per_token.items()},
            None if self.weights_N is None else self.weights_N[index_N],
            set_D,
            self._reports_of(set_D, sources, np.diff(offsets), targets_N),
        )

    def _reports_of(
        self, set_D: np.ndarray | None, sources: list[str], lengths_D: np.ndarray, targets_N: np.ndarray
    ) -> Mapping[str, DataReport]:
        """The sets' reports, with documents, tokens and targets counted anew."""
        if set_D is None:
            return {}
        set_N, count = np.repeat(set_D, lengths_D), len(self.reports)
        counts = zip(
            np.bincount(set_D, minlength=count).tolist(),
            np.bincount(set_N, minlength=count).tolist(),
            np.bincount(set_N[targets_N], minlength=count).tolist(),
            strict=True,
        )
        records = [
            count_records(sources[document] for document in np.flatnonzero(set_D == each)) for each in range(count)
        ]
        return {
            name: replace(report, documents=documents, records=own, tokens=tokens, target_tokens=targets)
            for (name, report), own, (documents, tokens, targets) in zip(
                self.reports.items(), records, counts, strict=True
            )
        }

    def split(self, share: float) -> tuple["Documents", "Documents"]:
        """(train, evaluation): a document is held out if the hash of its content falls below `share`.

        So the choice depends neither on the order of the records nor on the tokenizer, and equal documents stay on
        the same side. Each side gets at least one document. Raises ValueError if `share` is not in (0, 1) or if there
        are not two different documents.
        """
        if not 0 < share < 1:
            raise ValueError(f"the share of documents held out must lie between 0 and 1, got {share}")
        smallest, largest = self.keys_D.min(), self.keys_D.max()
        if smallest == largest:
            raise ValueError(
                f"{self.report.source}: one document is not enough to hold some out for evaluation; "
                "expected more documents, a separate file for the evaluation, or no evaluation"
            )
        held_out_D = self.keys_D < np.uint64(int(share * 2**64))
        held_out_D |= self.keys_D == smallest
        held_out_D &= self.keys_D != largest
        train, evaluation = self.select(np.flatnonzero(~held_out_D)), self.select(np.flatnonzero(held_out_D))
        # what was read, cut and skipped is reported once, for the whole source, with the training documents
        counts = evaluation.report
        only_its_own = DataReport(
            f"{share:g} of {counts.source}",
            documents=counts.documents,
            records=counts.records,
            tokens=counts.tokens,
            target_tokens=counts.target_tokens,
        )
        return train, replace(evaluation, report=only_its_own, set_D=None, reports={})

    def overlap(self, other: "Documents") -> int:
        """How many of these documents are also in `other`, compared by the record's content."""
        return int(np.isin(self.keys_D, other.keys_D).sum())

    def check_ids(self, rows: int, which: str, prefixes: Sequence[str] = ()) -> None:
        """Raise DataError for the first document with a token id that has no row in a head with `rows` rows.

        which: "student" or "teacher", for the error. prefixes: the teachers whose prefixes are checked, too.
        """
        read = [(self.tokens_N, self.offsets, "")]
        for name in prefixes:
            if name in self.prefixes:
                its = self.prefixes[name]
                read.append((its.tokens_N, its.offsets, f" of the prefix of teacher {name!r}"))
        for tokens_N, offsets, where in read:
            beyond = np.flatnonzero(tokens_N >= rows)
            if len(beyond):
                document = int(np.searchsorted(offsets, beyond[0], side="right")) - 1
                reason = f"token id {tokens_N[beyond[0]]}{where} has no row in the {which}'s head of {rows} rows"
                raise DataError(self.sources[document], reason)
