"""Tokenized documents in memory, and a report on the records they were made from.

A text longer than the limit is cut into consecutive pieces, which are separate documents. A prompt with completion or
a conversation is cut at its end. The report counts both, and every record that was skipped or has no target token.

D documents; N tokens of all documents, concatenated.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.reading import DataError, Record, read_records
from stillhouse.data.templates import (
    MOST_CHARACTERS,
    Encoded,
    RecordError,
    Rendered,
    Template,
    TemplateLimitError,
    Tokens,
    template_for,
    without_null,
)
from stillhouse.display import escaped, first_line

_BATCH = 512  # records tokenized at once
_REASONS = 5  # reasons for skips that a report keeps


@dataclass
class DataReport:
    """How many records were used, cut or skipped: `read` = `kept` + `skipped` + `without_target`."""

    source: str
    read: int = 0
    kept: int = 0
    skipped: int = 0  # records that could not be used; `reasons` has the errors of the first few
    without_target: int = 0  # records without a target token, maybe because the end was cut off
    cut_documents: int = 0  # documents shortened to the limit
    cut_tokens: int = 0  # tokens lost by shortening
    split_documents: int = 0  # texts cut into pieces, without loss
    documents: int = 0  # each piece counts as one
    tokens: int = 0
    target_tokens: int = 0
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for the reader of a log; counts that are zero are left out."""
        parts = [
            f"{self.documents:,} documents",
            f"{self.tokens:,} tokens",
            f"{self.target_tokens:,} to predict",
        ]
        if self.split_documents:
            parts.append(f"{self.split_documents:,} long texts in pieces")
        if self.cut_documents:
            parts.append(f"{self.cut_documents:,} cut at the limit ({self.cut_tokens:,} tokens lost)")
        if self.without_target:
            parts.append(f"{self.without_target:,} dropped with nothing to predict")
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped, the first: {self.reasons[0]}")
        return escaped(f"{self.source}: {', '.join(parts)}")


@dataclass(frozen=True)
class Documents:
    """D tokenized documents, concatenated.

    tokens_N: int32. targets_N: bool, whether a token is to be predicted; False for the first token of a document.
    offsets: [D+1] int64, document d is `offsets[d]:offsets[d+1]`. keys_D: uint64, a hash of the record's content,
    the same for all pieces of one text. sources: `file:line` of each document.
    """

    tokens_N: np.ndarray
    targets_N: np.ndarray
    offsets: np.ndarray
    keys_D: np.ndarray
    sources: list[str]
    report: DataReport

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens per document, int64."""
        return np.diff(self.offsets)

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of one document."""
        return self.tokens_N[self.offsets[document] : self.offsets[document + 1]]

    def targets(self, document: int) -> np.ndarray:
        """Which tokens of one document are to be predicted."""
        return self.targets_N[self.offsets[document] : self.offsets[document + 1]]

    def fingerprint(self) -> str:
        """A sha256 of tokens, targets and offsets. A resumed run compares it with the one in its checkpoint."""
        digest = hashlib.sha256()
        for array in (self.tokens_N, self.targets_N, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Documents":
        """The chosen documents, in the given order, with documents, tokens and targets in the report counted anew."""
        lengths = self.lengths_D[chosen]
        offsets = _offsets(lengths)
        shift_N = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], lengths)
        index_N = np.arange(offsets[-1]) + shift_N
        sources = [self.sources[document] for document in chosen]
        targets_N = self.targets_N[index_N]
        report = replace(self.report, documents=len(sources), tokens=len(index_N), target_tokens=int(targets_N.sum()))
        return Documents(self.tokens_N[index_N], targets_N, offsets, self.keys_D[chosen], sources, report)

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
            tokens=counts.tokens,
            target_tokens=counts.target_tokens,
        )
        return train, replace(evaluation, report=only_its_own)

    def overlap(self, other: "Documents") -> int:
        """How many of these documents are also in `other`, compared by the record's content."""
        return int(np.isin(self.keys_D, other.keys_D).sum())

    def check_ids(self, rows: int, which: str) -> None:
        """Raise DataError for the first document with a token id that has no row in a head with `rows` rows.

        which: "student" or "teacher", for the error.
        """
        beyond = np.flatnonzero(self.tokens_N >= rows)
        if len(beyond):
            document = int(np.searchsorted(self.offsets, beyond[0], side="right")) - 1
            reason = f"token id {self.tokens_N[beyond[0]]} has no row in the {which}'s head of {rows} rows"
            raise DataError(self.sources[document], reason)


def load_documents(
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    tokens: Tokens = "completion",
    on_error: Literal["raise", "skip"] = "raise",
) -> Documents:
    """Read and tokenize a dataset (see `read_records` for what `source` may be).

    max_tokens: the longest document. tokens: which tokens are targets if a record has a prompt or several roles.
    on_error: "raise" for a record that cannot be used, or "skip" it and count it.

    Raises ValueError for a missing or empty dataset, DataError (`file:line: reason`) for a record that cannot be used
    and for columns of no known form.
    """
    if max_tokens < 2:
        raise ValueError(
            f"max_tokens must be at least 2 (one input token and one token to predict), got {max_tokens}"
        )
    loader = _Loader(tokenizer, os.fspath(source), max_tokens, tokens, on_error == "skip")
    for record in read_records(source):
        loader.add(record)
    return loader.finish()


class _Loader:
    """Collects documents record by record, tokenizing a batch at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str, max_tokens: int, tokens: Tokens, skip: bool):
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.targets_are: Tokens = tokens
        self.skip = skip
        self.report = DataReport(source)
        self.template: Template | None = None
        self.waiting: list[tuple[Rendered, str, int]] = []
        self.characters = 0  # of the waiting records
        self.pieces: list[Encoded] = []
        self.keys: list[int] = []
        self.sources: list[str] = []

    def add(self, record: Record) -> None:
        self.report.read += 1
        if record.problem:
            self._reject(DataError(record.where, record.problem))
            return
        template = self.template = self.template or self._template_for(record)
        try:
            rendered = template.render(record.fields)
            key = _content_key(record.fields, template)
        except TemplateLimitError as error:
            raise DataError(record.where, str(error)) from error
        except (RecordError, RecursionError) as error:
            self._reject(DataError(record.where, first_line(error)))
            return
        characters = len(rendered.prompt) + len(rendered.body)
        if self.waiting and self.characters + characters > MOST_CHARACTERS:
            self._encode(template)
        self.waiting.append((rendered, record.where, key))
        self.characters += characters
        if len(self.waiting) == _BATCH:
            self._encode(template)

    def finish(self) -> Documents:
        if self.template is not None:
            self._encode(self.template)
        if not self.pieces:
            raise ValueError(self._why_empty())
        lengths = [len(piece.ids) for piece in self.pieces]
        tokens_N = np.concatenate([piece.ids for piece in self.pieces])
        targets_N = np.concatenate([piece.targets for piece in self.pieces])
        self.report.documents = len(lengths)
        self.report.tokens = len(tokens_N)
        self.report.target_tokens = int(targets_N.sum())
        self._warn_if_it_never_stops(tokens_N[targets_N])
        keys_D = np.asarray(self.keys, dtype=np.uint64)
        return Documents(tokens_N, targets_N, _offsets(lengths), keys_D, self.sources, self.report)

    def _template_for(self, record: Record) -> Template:
        try:
            return template_for(record.fields, self.tokenizer, self.targets_are)
        except ValueError as error:  # concerns the whole dataset: never skipped
            raise DataError(record.where, str(error)) from error

    def _reject(self, error: DataError) -> None:
        if not self.skip:
            raise error
        self.report.skipped += 1
        if len(self.report.reasons) < _REASONS:
            self.report.reasons.append(str(error))

    def _encode(self, template: Template) -> None:
        if not self.waiting:
            return
        batch = template.encode([rendered for rendered, _, _ in self.waiting])
        for encoded, (_, where, key) in zip(batch, self.waiting, strict=True):
            self._keep(self._fit(encoded, template.splits), where, key)
        self.waiting.clear()
        self.characters = 0

    def _fit(self, encoded: Encoded, splits: bool) -> list[Encoded]:
        """The document within the limit: unchanged, cut into pieces, or cut at its end."""
        excess = len(encoded.ids) - self.max_tokens
        if excess <= 0:
            return [encoded]
        if not splits:
            self.report.cut_documents += 1
            self.report.cut_tokens += excess
            return [Encoded(encoded.ids[: self.max_tokens], encoded.targets[: self.max_tokens])]
        self.report.split_documents += 1
        return _pieces(encoded, self.max_tokens)

    def _keep(self, pieces: list[Encoded], where: str, key: int) -> None:
        if not any(piece.targets.any() for piece in pieces):
            self.report.without_target += 1
            return
        self.report.kept += 1
        for number, piece in enumerate(pieces, start=1):
            self.pieces.append(piece)
            self.keys.append(key)
            self.sources.append(where if len(pieces) == 1 else f"{where} (piece {number} of {len(pieces)})")

    def _why_empty(self) -> str:
        report = self.report
        if not report.read:
            return f"{report.source}: the dataset is empty"
        text = f"{report.source}: nothing to train on; of {report.read} records {report.skipped} were skipped"
        if report.without_target:
            text += (
                f" and {report.without_target} have no token to predict (no completion or assistant turn "
                f"within max_tokens={self.max_tokens}; {report.cut_documents} were cut there)"
            )
        return text + "".join(f"\n  {reason}" for reason in report.reasons)

    def _warn_if_it_never_stops(self, predicted: np.ndarray) -> None:
        eos = self.tokenizer.eos_token_id
        if eos is not None and not (predicted == eos).any():
            self.report.warnings.append(
                f"{self.report.source}: the end-of-sequence token {self.tokenizer.eos_token!r} is never a "
                "target, so the student does not learn to stop with it (the chat template ends turns with "
                "another token, or the limit cuts every document)"
            )


def _pieces(encoded: Encoded, max_tokens: int) -> list[Encoded]:
    """Consecutive pieces of `max_tokens`. The last one may be shorter, but has at least 2 tokens if possible."""
    length = len(encoded.ids)
    starts = list(range(0, length, max_tokens))
    if length - starts[-1] == 1 and max_tokens > 2:
        starts[-1] -= 1
    pieces = []
    for start, stop in zip(starts, starts[1:] + [length], strict=True):
        targets = encoded.targets[start:stop].copy()
        targets[:1] = False  # nothing precedes it within the piece
        pieces.append(Encoded(encoded.ids[start:stop], targets))
    return pieces


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _content_key(fields: dict[str, Any], template: Template) -> int:
    """The first 64 bits of the sha256 of a record's used columns. Absent, null and empty extras give the same key."""
    used = [*template.columns, *(column for column in template.extras if fields.get(column))]
    content = json.dumps([without_null(fields[column]) for column in used], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
