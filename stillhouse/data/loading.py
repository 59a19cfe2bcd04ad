"""Makes documents from records: reads, tokenizes, cuts and counts them.

A text longer than the limit is cut into pieces, which are separate documents; each begins with the last token of the
one before it, so that no prediction is lost. A prompt with completion or
a conversation is cut at its end. The report counts both, and every record that was skipped or has no target token.
What a teacher reads, a document and its prefix, has the same limit.
"""

import functools
import hashlib
import io
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.columns import ForeignColumns, foreign_columns
from stillhouse.data.documents import DataReport, Documents, count_records, piece_source
from stillhouse.data.prefixes import EncodedPrefix, Prefixes, PrefixTemplate, offsets_of
from stillhouse.data.prompt_templates import prompt_template_for
from stillhouse.data.reading import DataError, Record, describe, local_files, read_records
from stillhouse.data.templates import (
    MOST_CHARACTERS,
    Encoded,
    RecordError,
    Rendered,
    Template,
    TemplateLimitError,
    Tokens,
    column_value,
    template_for,
    without_null,
)
from stillhouse.data.token_cache import TARGETS, TOKENS, cached_documents, entry_key
from stillhouse.display import first_line, name_list

_BATCH = 512  # records tokenized at once
_PART = 2**22  # tokens looked at at once
_REASONS = 5  # reasons for skips that a report keeps


def load_documents(
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_tokens: int,
    tokens: Tokens = "completion",
    on_error: Literal["raise", "skip"] = "raise",
    columns: Sequence[str] = (),
    allowed: Mapping[str, Collection[Any]] = MappingProxyType({}),
    prefixes: Mapping[str, str] = MappingProxyType({}),
    reader: str | None = None,
    prompts: bool = False,
    keep_records: bool = False,
    cache: Path | None = None,
) -> Documents:
    """Read and tokenize a dataset (see `read_records` for what `source` may be).

    max_tokens: the longest document, with its longest prefix. tokens: which tokens are targets if a record has a
    prompt or several roles. on_error: "raise" for a record that cannot be used, or "skip" it and count it. columns:
    further columns to keep, which every record must have. allowed: the only values that some of them may have.
    prefixes: by teacher, the template of what it reads in front of a document (see `PrefixTemplate`). reader: one of
    the columns, which names the only teacher that reads the document; the others then have no prefix for it. prompts:
    read only what a model writes after (see `prompt_templates.py`); such a document has no targets, and is refused
    instead of cut. keep_records: keep whole records, too. cache: a folder in which the tokens are kept, so that they
    are mapped from there instead of made again (`token_cache.py`); without effect for a hub id, with a tokenizer that
    is not a fast one, and with keep_records.

    Raises ValueError for a missing or empty dataset and for a prefix that is no template, DataError (`file:line:
    reason`) for a record that cannot be used and for columns of no known form.
    """
    if max_tokens < 2:
        raise ValueError(
            f"max_tokens must be at least 2 (one input token and one token to predict), got {max_tokens}"
        )

    def load(folder: Path | None) -> Documents:
        loader = _Loader(
            tokenizer,
            os.fspath(source),
            max_tokens,
            None if prompts else tokens,
            on_error == "skip",
            columns,
            allowed,
            prefixes,
            reader,
            keep_records,
            folder,
        )
        with loader:
            for record in read_records(source):
                loader.add(record)
            return loader.finish()

    if cache is None or keep_records or not tokenizer.is_fast or (files := local_files(source)) is None:
        return load(None)
    options = {
        "source": os.fspath(source),
        "max_tokens": max_tokens,
        "tokens": tokens,
        "on_error": on_error,
        "columns": list(columns),
        "allowed": {name: list(values) for name, values in allowed.items()},
        "prefixes": list(prefixes.items()),
        "reader": reader,
        "prompts": prompts,
    }
    key = functools.partial(entry_key, files, tokenizer, options)
    return cached_documents(cache, lambda: local_files(source) or [], key, load)


@dataclass(frozen=True)
class _Waiting:
    """A record before it is tokenized. values: of the columns to keep. prefixes: the text for each teacher."""

    rendered: Rendered
    where: str
    key: int
    values: list[Any]
    prefixes: list[str]
    record: dict[str, Any] | None

    @property
    def characters(self) -> int:
        return sum(map(len, (self.rendered.prompt, self.rendered.body, *self.prefixes)))


class _Loader:
    """Collects documents record by record, tokenizing a batch at a time."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        max_tokens: int,
        tokens: Tokens | None,
        skip: bool,
        columns: Sequence[str],
        allowed: Mapping[str, Collection[Any]],
        prefixes: Mapping[str, str],
        reader: str | None,
        keep_records: bool,
        folder: Path | None,
    ):
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.targets_are = tokens  # None: only prompts are read
        self.skip, self.keep_records = skip, keep_records
        self.columns, self.allowed, self.reader = columns, allowed, reader
        self.prefix_templates = {name: PrefixTemplate(name, template) for name, template in prefixes.items()}
        self.report = DataReport(source)
        self.template: Template | None = None
        self.foreign: ForeignColumns | None = None
        self.waiting: list[_Waiting] = []
        self.characters = 0  # of the waiting records
        # the tokens and targets of all documents: in memory, or in files of a folder
        self.folder = folder
        self.files: list[BinaryIO] = [
            io.BytesIO() if folder is None else (folder / f"{name}.bin").open("wb") for name in (TOKENS, TARGETS)
        ]
        # one entry per document
        self.lengths: list[int] = []
        self.keys: list[int] = []
        self.sources: list[str] = []
        self.values: list[list[Any]] = []
        self.prefixes: list[list[EncodedPrefix]] = []
        self.records: list[dict[str, Any]] = []

    def add(self, record: Record) -> None:
        self.report.read += 1
        if record.problem:
            self._reject(DataError(record.where, record.problem))
            return
        try:
            record, template = self._in_our_columns(record)
            waiting = self._rendered(record, template)
        except TemplateLimitError as error:
            raise DataError(record.where, str(error)) from error
        except (RecordError, RecursionError) as error:
            self._reject(DataError(record.where, first_line(error)))
            return
        if self.waiting and self.characters + waiting.characters > MOST_CHARACTERS:
            self._encode(template)
        self.waiting.append(waiting)
        self.characters += waiting.characters
        if len(self.waiting) == _BATCH:
            self._encode(template)

    def finish(self) -> Documents:
        if self.template is not None:
            self._encode(self.template)
        if not self.lengths:
            raise ValueError(self._why_empty())
        tokens_N, targets_N = self._array(0, np.int32), self._array(1, np.bool_)
        self.report.documents, self.report.records = len(self.lengths), count_records(self.sources)
        self.report.tokens = len(tokens_N)
        self.report.target_tokens = int(targets_N.sum())
        if self.targets_are is not None:
            self._warn_if_it_never_stops(tokens_N, targets_N)
        keys_D = np.asarray(self.keys, dtype=np.uint64)
        columns = dict(zip(self.columns, map(list, zip(*self.values, strict=True)), strict=True))
        by_teacher = map(Prefixes.of, zip(*self.prefixes, strict=True))
        prefixes = dict(zip(self.prefix_templates, by_teacher, strict=True))
        offsets = offsets_of(self.lengths)
        return Documents(
            tokens_N, targets_N, offsets, keys_D, self.sources, self.report, columns, prefixes, self.records
        )

    def __enter__(self) -> "_Loader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            if self.folder is not None:
                file.close()

    def _array(self, number: int, dtype: type[np.generic]) -> np.ndarray:
        file = self.files[number]
        if isinstance(file, io.BytesIO):
            return np.frombuffer(file.getbuffer(), dtype=dtype)
        file.flush()
        return np.memmap(file.name, dtype=dtype, mode="r")

    def _in_our_columns(self, record: Record) -> tuple[Record, Template]:
        """The record with our own columns, and the template, which the first record decides. Raises RecordError."""
        if self.template is not None:
            return self._converted(record), self.template
        try:
            self.foreign = foreign_columns(record.fields, self.tokenizer, prompts=self.targets_are is None)
        except ValueError as error:
            raise DataError(record.where, str(error)) from error
        record = self._converted(record)
        self.template = self._template_for(record)
        self.report.form = "" if self.foreign is None else self.foreign.words
        return record, self.template

    def _converted(self, record: Record) -> Record:
        return record if self.foreign is None else replace(record, fields=self.foreign.convert(record.fields))

    def _template_for(self, record: Record) -> Template:
        try:
            if self.targets_are is None:
                return prompt_template_for(record.fields, self.tokenizer)
            return template_for(record.fields, self.tokenizer, self.targets_are)
        except ValueError as error:  # concerns the whole dataset: never skipped
            raise DataError(record.where, str(error)) from error

    def _rendered(self, record: Record, template: Template) -> _Waiting:
        return _Waiting(
            template.render(record.fields),
            record.where,
            _content_key(record.fields, template),
            [_kept_value(record.fields, column, self.allowed.get(column)) for column in self.columns],
            [
                prefix.render(record.fields, template)
                if self.reader is None or record.fields[self.reader] == name
                else ""
                for name, prefix in self.prefix_templates.items()
            ],
            record.fields if self.keep_records else None,
        )

    def _reject(self, error: DataError) -> None:
        if not self.skip:
            raise error
        self.report.skipped += 1
        if len(self.report.reasons) < _REASONS:
            self.report.reasons.append(str(error))

    def _encode(self, template: Template) -> None:
        if not self.waiting:
            return
        batch = template.encode([each.rendered for each in self.waiting])
        texts_by_teacher = zip(*(each.prefixes for each in self.waiting), strict=True)
        by_teacher = [
            prefix.encode(texts, batch, self.tokenizer, template.bos_from)
            for prefix, texts in zip(self.prefix_templates.values(), texts_by_teacher, strict=True)
        ]
        for number, (encoded, waiting) in enumerate(zip(batch, self.waiting, strict=True)):
            self._keep(encoded, waiting, [prefixes[number] for prefixes in by_teacher], template.splits)
        self.waiting.clear()
        self.characters = 0

    def _fit(self, encoded: Encoded, max_tokens: int, splits: bool) -> list[Encoded]:
        """The document within the limit: unchanged, cut into pieces, or cut at its end."""
        excess = len(encoded.ids) - max_tokens
        if excess <= 0:
            return [encoded]
        if not splits:
            self.report.cut_documents += 1
            self.report.cut_tokens += excess
            return [Encoded(encoded.ids[:max_tokens], encoded.targets[:max_tokens])]
        self.report.split_documents += 1
        return _pieces(encoded, max_tokens)

    def _keep(self, encoded: Encoded, waiting: _Waiting, prefixes: list[EncodedPrefix], splits: bool) -> None:
        longest = max((len(prefix.ids) for prefix in prefixes), default=0)
        if self.max_tokens - longest < 2:
            self._reject(DataError(waiting.where, self._no_room(prefixes, longest)))
            return
        if self.targets_are is None:
            pieces, problem = [encoded], self._no_prompt(len(encoded.ids), self.max_tokens - longest)
            if problem:
                self._reject(DataError(waiting.where, problem))
                return
        else:
            pieces = self._fit(encoded, self.max_tokens - longest, splits)
        if self.targets_are is not None and not any(piece.targets.any() for piece in pieces):
            self.report.without_target += 1
            return
        self.report.kept += 1
        self.report.joined_turns += encoded.joined_turns
        for number, piece in enumerate(pieces):
            self.lengths.append(len(piece.ids))
            for file, values in zip(self.files, (piece.ids, piece.targets), strict=True):
                file.write(values.tobytes())
            self.keys.append(waiting.key)
            self.sources.append(piece_source(waiting.where, number, len(pieces)))
            self.values.append(waiting.values)
            self.prefixes.append([prefix.for_piece(number) for prefix in prefixes])
            if waiting.record is not None:
                self.records.append(waiting.record)

    def _no_prompt(self, tokens: int, most: int) -> str:
        """Why nothing can be written after a prompt of so many tokens; "" if something can."""
        if not tokens:
            return "the prompt has no token, so that nothing can follow it: expected at least one"
        if tokens > most:
            return (
                f"the prompt has {tokens:,} tokens: expected at most {most:,}, so that a completion fits behind it; "
                "shorten it, raise data.max_tokens, or lower rollout.max_new_tokens"
            )
        return ""

    def _no_room(self, prefixes: list[EncodedPrefix], longest: int) -> str:
        teacher = next(
            name for name, prefix in zip(self.prefix_templates, prefixes, strict=True) if len(prefix.ids) == longest
        )
        return (
            f"the prefix of teacher {teacher!r} has {longest:,} tokens, which leaves fewer than 2 of the "
            f"{self.max_tokens:,} of max_tokens for the document: expected a shorter prefix or a larger max_tokens"
        )

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

    def _warn_if_it_never_stops(self, tokens_N: np.ndarray, targets_N: np.ndarray) -> None:
        eos = self.tokenizer.eos_token_id
        parts = [slice(start, start + _PART) for start in range(0, len(tokens_N), _PART)]
        if eos is not None and not any((tokens_N[part][targets_N[part]] == eos).any() for part in parts):
            self.report.warnings.append(
                f"{self.report.source}: the end-of-sequence token {self.tokenizer.eos_token!r} is never a "
                "target, so the student does not learn to stop with it (the chat template ends turns with "
                "another token, or the limit cuts every document)"
            )


def _pieces(encoded: Encoded, max_tokens: int) -> list[Encoded]:
    """Pieces of at most `max_tokens`, each of which begins with the last token of the piece before it.

    So that token is read, not predicted, in the later piece, and every token behind the text's first one is predicted
    once.
    """
    pieces = []
    for start in range(0, len(encoded.ids) - 1, max_tokens - 1):
        targets = encoded.targets[start : start + max_tokens].copy()
        targets[:1] = False
        pieces.append(Encoded(encoded.ids[start : start + max_tokens], targets))
    return pieces


def _kept_value(fields: dict[str, Any], column: str, allowed: Collection[Any] | None) -> Any:
    value = column_value(fields, column)
    if value is None:  # Parquet stores an absent value as null
        raise RecordError(f"column '{column}' is null; expected a value in every record")
    if allowed is not None and value not in allowed:
        raise RecordError(f"column '{column}' is {describe(value)}: expected one of {name_list(allowed)}")
    return value


def _content_key(fields: dict[str, Any], template: Template) -> int:
    """The first 64 bits of the sha256 of a record's used columns. Absent, null and empty extras give the same key."""
    used = [*template.columns, *(column for column in template.extras if fields.get(column))]
    content = json.dumps([without_null(fields[column]) for column in used], sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big")
