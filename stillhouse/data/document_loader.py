"""Makes documents from records: reads, tokenizes, cuts and counts the records.

A plain text longer than the limit is split into pieces, which are separate documents. A piece begins with the last
token of the previous piece, so that no prediction is lost. Conversations, and prompts with their completions, are
truncated at the end. The report counts split and truncated records, and records that were skipped or have no target
token. The limit applies to a document together with its longest prefix for a teacher.
"""

import functools
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from stillhouse.data.data_report import DataReport, TextFindings
from stillhouse.data.documents import Documents
from stillhouse.data.media import MEDIA_COLUMNS, MediaProcessor, with_media
from stillhouse.data.media_files import MediaFile
from stillhouse.data.read.data_source import local_files, read_records
from stillhouse.data.read.foreign_columns import (
    OPTIONAL,
    ForeignColumns,
    foreign_columns,
    renamed,
    require_read,
    with_source_names,
)
from stillhouse.data.record import (
    MAX_CHARACTERS,
    DataError,
    ProcessorError,
    Record,
    RecordError,
    TemplateLimitError,
    kept_value,
    without_null,
)
from stillhouse.data.render.record_forms import template_for
from stillhouse.data.render.teacher_substitutions import PrefixTemplate, TeacherMedia
from stillhouse.data.render.templates import Encoded, Rendered, Targets, Template, Tokens
from stillhouse.data.substitutions import Substitution, piece_substitutions
from stillhouse.data.token_cache import DocumentWriter, cached_documents, entry_key
from stillhouse.display import escaped, first_line

_BATCH = 512  # records per call of the tokenizer
_REASONS = 5  # the maximum number of errors that a report keeps
_BYTES_PER_CHARACTER = 200  # the memory that a tokenizer needs; so this many bytes of media count as one character


@dataclass(frozen=True)
class LoadOptions:
    """Options for the conversion of records to documents.

    max_tokens: the maximum number of tokens of a document with its longest prefix.
    tokens: which tokens are targets. It matters only if a record has a prompt or several roles.
    on_error: with "skip", an invalid record is skipped and counted; with "raise", it raises DataError.
    columns: the names of additional columns to keep; every record must have them.
    allowed: for some of these columns, the allowed values.
    prefixes: for each teacher, the template of the prefix that this teacher reads (see `PrefixTemplate`).
    reader: the one of `columns` that names the only teacher that reads the document. Other teachers get no prefix.
    prompts: whether only prompts are read, without completions (see `record_forms.py`). The documents then have no
        targets, and a record with a prompt that is too long is invalid.
    tools: the JSON schemas of the tools of the run, which its model can call. A conversation is rendered with all of
        them, or, if it has a column `tools`, with the tools in this column, which must be tools of the run.
    fits_teachers: whether `max_tokens` also limits the number of tokens that a teacher reads, if its processor makes
        more tokens of media than the student's.
    end_ids: the end-of-sequence ids of the student, in addition to the end-of-sequence id of the tokenizer.
    turns: which of the assistant's turns of a conversation are targets; "last" needs conversations that end with one.
    column_names: the names of the source's columns, by the names that Stillhouse reads (`renamed`). All other options
        and the kept records have the source's names.

    Raises ValueError if `max_tokens` is less than 2, and for turns="last" with tokens="all".
    """

    max_tokens: int
    tokens: Tokens = "completion"
    on_error: Literal["raise", "skip"] = "raise"
    columns: Sequence[str] = ()
    allowed: Mapping[str, Collection[Any]] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    reader: str | None = None
    prompts: bool = False
    keep_records: bool = False
    fits_teachers: bool = True
    tools: Sequence[dict[str, Any]] | None = None
    end_ids: Sequence[int] = ()
    turns: Literal["all", "last"] = "all"
    column_names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2 (an input token and a target), got {self.max_tokens}")
        if self.turns == "last" and self.tokens == "all":
            raise ValueError("turns='last' with tokens='all': expected tokens='completion'")

    @property
    def targets(self) -> Targets:
        return "none" if self.prompts else "last" if self.turns == "last" else self.tokens


def load_documents(
    source: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase,
    options: LoadOptions,
    cache: Path | None = None,
    processor: MediaProcessor | None = None,
    teachers: Mapping[str, TeacherMedia] | None = None,
) -> Documents:
    """Read and tokenize a dataset. source: as in `read_records`.

    processor: the student's processor of media.
    teachers: how teachers in this job read media, by name. All other teachers read media as the student does.
    cache: a folder of tokenized datasets, which are memory-mapped (`token_cache.py`). It has no effect for a hub id,
        a slow tokenizer, or `keep_records`.

    Raises ValueError for a missing or empty dataset and for an invalid prefix template. Raises DataError (`file:line:
    reason`) for an invalid record, and if the columns do not match exactly one form of records.
    """
    name = os.fspath(source)

    def load(folder: Path | None) -> Documents:
        with closing(DocumentWriter(folder)) as writer:
            loader = _Loader(name, tokenizer, options, writer, processor, teachers or {})
            records = read_records(source, options.column_names)
            for record in _with_live_line(records, f"tokenizing {name}"):
                loader.add(record)
            return loader.finish()

    if cache is None or options.keep_records or not tokenizer.is_fast or (files := local_files(source)) is None:
        return load(None)
    # the prefixes are a list, because their order matters, and `json_hash` ignores the order of an object's keys
    decisive = asdict(options) | {"source": name, "prefixes": list(options.prefixes.items())}
    if processor is not None:
        decisive["processor"] = [processor.identity(), processor.versions()]
        decisive["teachers"] = {name: teacher.identity() for name, teacher in (teachers or {}).items()}
    key = functools.partial(entry_key, files, tokenizer, decisive)
    return cached_documents(cache, lambda: local_files(source) or [], key, load)


def _with_live_line(records: Iterator[Record], words: str) -> Iterable[Record]:
    """Show the number of records after a second, on a terminal of rank 0."""
    is_hidden = True if os.environ.get("RANK", "0") != "0" else None  # None: on a terminal only
    lines: Iterable[Record] = tqdm(records, escaped(words), unit=" records", leave=False, delay=1, disable=is_hidden)
    return lines


class _Waiting(NamedTuple):
    """A record that is not tokenized yet. values: the values of the kept columns. prefixes: each teacher's prefix as
    text. media: each teacher's substitutions for the student's tokens of media, by the teacher's name.
    """

    rendered: Rendered
    where: str
    key: int
    values: list[Any]
    prefixes: list[str]
    media: dict[str, list[Substitution]]
    record: dict[str, Any] | None


class _Loader:
    """Collects documents record by record, and tokenizes a batch of records at a time."""

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        options: LoadOptions,
        writer: DocumentWriter,
        processor: MediaProcessor | None,
        teachers: Mapping[str, TeacherMedia],
    ):
        self.tokenizer, self.options, self.writer = tokenizer, options, writer
        self.processor, self.teachers = processor, teachers
        self.prefix_templates = {name: PrefixTemplate(name, text) for name, text in options.prefixes.items()}
        self.report = DataReport(source)
        self.template: Template | None = None
        self.foreign: ForeignColumns | None = None
        self.waiting: list[_Waiting] = []
        self.characters = 0  # the number of characters of all waiting records
        #: the optional columns of `column_names` that no record has had
        self.unseen = {name: column for name, column in options.column_names.items() if name in OPTIONAL}
        self.end_ids = {*options.end_ids, *([] if (eos := tokenizer.eos_token_id) is None else [eos])}
        self.findings = TextFindings(tokenizer, options.targets, self.end_ids)

    def add(self, record: Record) -> None:
        self.report.read += 1
        if record.problem:
            self._reject(record.where, record.problem)
            return
        self.unseen = {name: column for name, column in self.unseen.items() if column not in record.fields}
        try:
            template = self.template or self._template_for(record)
            waiting = self._rendered(record, template)
        except (TemplateLimitError, ProcessorError) as error:
            raise DataError(record.where, str(error)) from error
        except (RecordError, RecursionError) as error:
            self._reject(record.where, first_line(error), error)
            return
        rendered, media = waiting.rendered, () if waiting.rendered.encoded is None else waiting.rendered.encoded.media
        characters = sum(map(len, (rendered.prompt, rendered.body, *waiting.prefixes)))
        characters += sum(len(file.data or b"") for file in media) // _BYTES_PER_CHARACTER
        if self.characters + characters > MAX_CHARACTERS:
            self._encode(template)
        self.waiting.append(waiting)
        self.characters += characters
        if len(self.waiting) == _BATCH:
            self._encode(template)

    def finish(self) -> Documents:
        if self.template is not None:
            self._encode(self.template)
        report = self.report
        if not report.read:
            raise ValueError(f"{report.source}: the dataset is empty")
        if self.template is None or not self.writer.sources:
            text = f"{report.source}: nothing to train on; of {report.read} records {report.skipped} were skipped"
            if report.without_target:
                text += (
                    f" and {report.without_target} have no token to predict (no completion or assistant turn within "
                    f"max_tokens={self.options.max_tokens}; {report.cut_documents} were cut at this limit)"
                )
            raise ValueError("\n  ".join([text, *report.reasons]))
        for name, column in self.unseen.items():
            raise ValueError(f"{report.source}: columns: {{{name}: {column}}} names a column that no record has")
        tokens_N, targets_N = self.writer.arrays()
        self.findings.add_duplicates(np.asarray(self.writer.keys, dtype=np.uint64), self.writer.sources)
        report = report.counted(self.writer.sources, len(tokens_N), targets_N.sum())
        report.trained_ends = sorted(self.findings.trained_ends)
        report.duplicates, report.empty_answers = (self.findings.count(kind) for kind in ("duplicate", "empty"))
        report.warnings.extend(self.findings.warnings(report.source))
        report.warnings.extend(f"{report.source}: {line}" for line in self.template.warnings())
        return self.writer.documents(report, self.options.columns, self.prefix_templates, self.teachers)

    def _template_for(self, first: Record) -> Template:
        """Choose the template and the conversion of columns. Raises RecordError for an error of the record, and
        DataError for an error that concerns all records, which on_error="skip" does not skip.
        """
        targets, names = self.options.targets, self.options.column_names
        tools = None if self.options.tools is None else list(self.options.tools)
        try:
            fields = renamed(first.fields, names)
            self.foreign = foreign_columns(fields, self.tokenizer, prompts=targets == "none")
            fields = self._converted(first)
            template = template_for(fields, self.tokenizer, targets, self.processor, tools, self.end_ids)
            extras = (*template.extras, *MEDIA_COLUMNS) if template.extras else ()  # only conversations have media
            foreign = () if self.foreign is None else self.foreign.columns
            require_read(names, (*template.columns, *extras, *foreign), template.columns)
        except RecordError:
            raise
        except ValueError as error:
            raise DataError(first.where, with_source_names(str(error), names)) from error
        self.template = template
        self.report.form = "" if self.foreign is None else self.foreign.words
        return self.template

    def _converted(self, record: Record) -> dict[str, Any]:
        fields = renamed(record.fields, self.options.column_names)
        fields = fields if self.foreign is None else self.foreign.convert(fields)
        return with_media(replace(record, fields=fields)).fields

    def _rendered(self, record: Record, template: Template) -> _Waiting:
        fields, options = self._converted(record), self.options
        rendered = template.render(fields)
        self.findings.add(rendered, fields, record.where)
        # The key is the first 64 bits of the sha256 of the used columns, with the hashes of files in place of paths.
        used = [*template.columns, *(column for column in template.extras if fields.get(column))]
        content = json.dumps(
            [without_null(fields[column]) for column in used],
            sort_keys=True,
            default=lambda value: value.sha256.hex() if isinstance(value, MediaFile) else str(value),
        )
        values = [kept_value(record.fields, column, options.allowed.get(column)) for column in options.columns]
        reader = None if options.reader is None else record.fields[options.reader]
        prefixes = [
            prefix.render(record.fields | fields, template) if reader in (None, name) else ""
            for name, prefix in self.prefix_templates.items()
        ]
        media: dict[str, list[Substitution]] = {}
        if (encoded := rendered.encoded) is not None and encoded.media:
            for name, teacher in self.teachers.items():
                if reader in (None, name):
                    special = template.adds_special
                    media[name] = teacher.substitutions(rendered.body, encoded, encoded.media, special=special)
                elif teacher.is_shared:
                    media[name] = []
                else:  # the teacher does not read the document
                    media[name] = [Substitution(0, len(encoded.ids), np.empty(0, dtype=np.int32))]
        return _Waiting(
            rendered,
            record.where,
            int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big"),
            values,
            prefixes,
            media,
            record.fields if options.keep_records else None,
        )

    def _reject(self, where: str, problem: str, cause: Exception | None = None) -> None:
        error = DataError(where, with_source_names(problem, self.options.column_names))
        if self.options.on_error == "raise":
            raise error from cause
        self.report.skipped += 1
        if len(self.report.reasons) < _REASONS:
            self.report.reasons.append(str(error))

    def _encode(self, template: Template) -> None:
        self._encode_together(template, self.waiting)
        self.waiting.clear()
        self.characters = 0

    def _encode_together(self, template: Template, records: Sequence[_Waiting]) -> None:
        if not records:
            return
        try:
            batch = template.encode([record.rendered for record in records])
            by_teacher = [
                prefix.encode(
                    [record.prefixes[number] for record in records], batch, self.tokenizer, template.bos_from
                )
                for number, prefix in enumerate(self.prefix_templates.values())
            ]
        except RecordError as error:
            if len(records) == 1:
                self._reject(records[0].where, str(error))
            else:  # encode the records one by one, because the error does not say which record is invalid
                for record in records:
                    self._encode_together(template, [record])
            return
        for number, (encoded, record) in enumerate(zip(batch, records, strict=True)):
            prefixes = {name: by_teacher[place][number] for place, name in enumerate(self.prefix_templates)}
            self._keep(encoded, record, prefixes, template.splits)

    def _keep(self, encoded: Encoded, waiting: _Waiting, prefixes: dict[str, Substitution], splits: bool) -> None:
        gains = {name: prefix.gain for name, prefix in prefixes.items()}
        for name, substitutions in waiting.media.items() if self.options.fits_teachers else ():
            gains[name] = gains.get(name, 0) + sum(substitution.gain for substitution in substitutions)
        room = self.options.max_tokens - max([0, *gains.values()])
        problem = self._problem(encoded, gains, room)
        if problem:
            self._reject(waiting.where, problem)
            return
        pieces, excess, report = [encoded], len(encoded.ids) - room, self.report
        if excess > 0 and splits:
            report.split_documents += 1
            pieces = encoded.pieces(room)
        elif excess > 0:
            report.cut_documents += 1
            report.cut_tokens += excess
            pieces = [replace(encoded, ids=encoded.ids[:room], targets=encoded.targets[:room])]
        if self.options.targets != "none":
            if not any(piece.targets.any() for piece in pieces):
                report.without_target += 1
                return
            self.findings.add_ends(encoded, sum(len(piece.ids) for piece in pieces), waiting.rendered.end)
        report.kept += 1
        report.joined_turns += encoded.joined_turns
        for number, piece in enumerate(pieces):
            source = f"{waiting.where} (piece {number + 1} of {len(pieces)})" if len(pieces) > 1 else waiting.where
            by_teacher = piece_substitutions(prefixes, waiting.media, len(piece.ids), is_first=not number)
            self.writer.add(piece, source, waiting.key, waiting.values, by_teacher, waiting.record)

    def _problem(self, encoded: Encoded, gains: dict[str, int], room: int) -> str:
        """The error of a document, or "".

        gains: for each teacher, its number of tokens minus the student's, by the teacher's name.
        room: the maximum number of tokens of the document for the student: `max_tokens` minus the largest gain.
        """
        most = self.options.max_tokens
        if room < 2:
            prefix = f"the prefix of teacher {max(gains, key=gains.__getitem__)!r}"
            what = "a teacher's prefix and additional image tokens have" if encoded.media else f"{prefix} has"
            return (
                f"{what} {most - room:,} tokens, so that fewer than 2 of max_tokens={most:,} are left for the "
                "document: expected a shorter prefix, smaller images or a larger data.max_tokens"
            )
        if (media_end := max((stop for _, stop in encoded.media_spans), default=0)) > room:
            return (
                f"its images end at token {media_end:,}, but the document would be cut at token {room:,}: "
                "expected all images of a document before the cut; raise data.max_tokens, lower data.image_pixels, "
                "or give fewer images"
            )
        if self.options.targets != "none":
            return ""
        if not len(encoded.ids):
            return "the prompt has no token, so a model cannot continue it: expected a prompt of at least one token"
        if len(encoded.ids) > room:
            return (
                f"the prompt has {len(encoded.ids):,} tokens: expected at most {room:,}, so that there is room for a "
                "completion; shorten the prompt, raise data.max_tokens, or lower rollout.max_new_tokens"
            )
        return ""
