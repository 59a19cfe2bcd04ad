"""Aligns the tokens of two tokenizers on the same text. A span is the text between two positions at which both
tokenizers have a token border.

A document is stored as the student's ids, so its text is recovered from their bytes. The teacher's tokenizer then
tokenizes the same text. Special tokens are not part of the text. They are translated one by one:

    the student's tokens before a text     the teacher's tokens before a text
    EOS or BOS                             the teacher's EOS or BOS; without it, as for another special token
    another special token                  the teacher's special token of the same name, else the name as text

If the student's tokenizer puts no token before a text, every document counts as the beginning of a text. If a long
text was split, a document can begin or end within a character. The bytes of this character have no counterpart, and
the teacher does not read them.

N bytes of a text, G spans.
"""

import codecs
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.documents import Documents
from stillhouse.data.offsets import offsets_of
from stillhouse.data.record import DataError
from stillhouse.data.render.token_bytes import TokenBytes

_MAX_CONTINUATION_BYTES = 3  # the maximum number of bytes of a UTF-8 character after its first byte
ABSENT = -1
_BATCH = 512  # documents per call of the tokenizer


class AlignedSpan(NamedTuple):
    """The positions of the tokens that represent the same piece of text."""

    student: range
    teacher: range


@dataclass(frozen=True)
class AlignedDocument:
    """The teacher's tokens of a document, and the spans in ascending order. Every span has tokens of the student and
    of the teacher. A token without a counterpart is in no span.

    begins: the positions of student tokens that begin a text before which the student's tokenizer puts a space.
    """

    teacher_tokens: np.ndarray
    spans: list[AlignedSpan]
    begins: frozenset[int] = frozenset()


@dataclass
class _Draft:
    """A document that is being translated.

    begins: whether the document begins at the beginning of a text, and not in the middle of it.
    parts: each text and special token, as the positions of its student tokens, and the text or the teacher's ids.
    behind_space: see `AlignedDocument.begins`.
    """

    begins: bool
    parts: "list[tuple[range, _Text | list[int]]]" = field(default_factory=list)
    behind_space: list[int] = field(default_factory=list)


@dataclass
class _Text:
    """A text without special tokens. ends: the number of bytes up to the end of each student token. first: the number
    of bytes before `text`, which belong to an incomplete character. is_inner: whether the teacher's tokenizer puts no
    space before the text. ids: the teacher's ids.
    """

    text: str
    ends: np.ndarray
    first: int
    is_inner: bool = True
    ids: list[int] = field(default_factory=list)


class Aligner:
    """Translates documents from the student's ids to the teacher's ids.

    teacher_of: for each id of the student, the teacher's id with the same bytes or the same role, or -1.
    student_of: the inverse of `teacher_of`; each id has at most one counterpart.
    first_of: for each id of the teacher, the student's token with the same bytes. If the student has no such token,
        these bytes are tokenized with the student's tokenizer as the middle of a text, and `first_of` is the first
        token of the result; or -1 if the bytes cannot be tokenized exactly.
    first_of_text: like `first_of`, for bytes at the beginning of a text, where the student's tokenizer adds a space.

    Raises ValueError for a tokenizer whose tokens have no exact bytes.
    """

    def __init__(self, student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase):
        self.student, self.teacher = TokenBytes(student), TokenBytes(teacher)
        self.teacher_of = np.full(1 + max(student.get_vocab().values()), ABSENT, dtype=np.int32)
        self.student_of = np.full(1 + max(teacher.get_vocab().values()), ABSENT, dtype=np.int32)
        # the teacher's ids for each special token of the student: within a text (True), and at its beginning (False)
        self._special: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
        by_content = {content: [index] for index, content in self.teacher.special.items()}
        roles = [(self.student.bos, self.teacher.bos), (self.student.eos, self.teacher.eos)]
        teacher_role = {role: ids for role, ids in roles if ids is not None}
        for inner, translations in self._special.items():
            for index, name in self.student.special.items():
                if index in teacher_role:
                    translations[index] = [teacher_role[index]]
                else:
                    translations[index] = by_content.get(name) or self.teacher.encode([name], inner=inner)[0]
        for content, index in self.student.id_of.items():
            if (teacher_id := self.teacher.id_of.get(content)) is not None:
                self.teacher_of[index], self.student_of[teacher_id] = teacher_id, index
        # the student's EOS first, because another token of the student may have the name of the teacher's EOS
        for index, ids in sorted(self._special[True].items(), key=lambda pair: pair[0] != self.student.eos):
            if len(ids) == 1 and ids[0] in self.teacher.special and self.student_of[ids[0]] == ABSENT:
                self.teacher_of[index], self.student_of[ids[0]] = ids[0], index

    @cached_property
    def first_of(self) -> np.ndarray:
        first_of = self.student_of.copy()
        for index, content in self.teacher.bytes_of.items():
            if first_of[index] == ABSENT and content in self.student.id_of:
                first_of[index] = self.student.id_of[content]
        absent = [index for index in self.teacher.bytes_of if first_of[index] == ABSENT]
        return self._with_first(first_of, absent, inner=True)

    @cached_property
    def first_of_text(self) -> np.ndarray:
        return self._with_first(self.first_of.copy(), self.teacher.bytes_of, inner=False)

    def _with_first(self, first_of: np.ndarray, indices: Collection[int], *, inner: bool) -> np.ndarray:
        """Tokenize the text of each teacher's token in `indices` with the student's tokenizer, and set `first_of` to
        the first token of the result, or to -1 if the result has other bytes. Tokens that do not consist of whole
        characters are left out. Returns `first_of`.
        """
        texts = {}
        for index in indices:
            with suppress(UnicodeDecodeError):
                texts[index] = self.teacher.bytes_of[index].decode()
        encoded = self.student.encode(list(texts.values()), inner=inner)
        for (index, text), ids in zip(texts.items(), encoded, strict=True):
            if ids and not self.student.special.keys() & set(ids):
                content = b"".join(self.student.pieces(ids))
                is_exact = content == text.encode() or (not inner and content == b" " + text.encode())
                first_of[index] = ids[0] if is_exact else ABSENT
        return first_of

    def align(self, documents: Sequence[np.ndarray]) -> list[AlignedDocument]:
        """Align documents. Raises ValueError if the teacher's tokens do not represent exactly the same text."""
        drafts = [self._draft(tokens) for tokens in documents]
        all_texts = [part for draft in drafts for _, part in draft.parts if isinstance(part, _Text)]
        for inner in (False, True):
            texts = [text for text in all_texts if text.is_inner is inner]
            encoded = self.teacher.encode([text.text for text in texts], inner=inner)
            for text, ids in zip(texts, encoded, strict=True):
                text.ids = ids
        return [self._aligned(draft) for draft in drafts]

    def translate(self, documents: Documents) -> Documents:
        """The documents in the teacher's ids, without targets. Raises DataError if a document cannot be aligned."""
        ids: list[np.ndarray] = []
        for start in range(0, len(documents), _BATCH):
            batch = range(start, min(start + _BATCH, len(documents)))
            try:
                ids += [aligned.teacher_tokens for aligned in self.align([documents.tokens(at) for at in batch])]
            except ValueError:
                for number in batch:
                    try:
                        self.align([documents.tokens(number)])
                    except ValueError as error:
                        raise DataError(documents.sources[number], str(error)) from error
                raise
        tokens_N, offsets = np.concatenate(ids), offsets_of([len(teacher_ids) for teacher_ids in ids])
        targets_N = np.zeros(len(tokens_N), dtype=bool)
        return Documents(tokens_N, targets_N, offsets, documents.keys_D, documents.sources, documents.report)

    def _draft(self, tokens: np.ndarray) -> _Draft:
        ids, prefix = tokens.tolist(), self.student.prefix
        # the number of tokens that the student's tokenizer has put before the document's text
        begin = len(prefix) if ids[: len(prefix)] == prefix else 0
        begin = begin or int(bool(ids) and ids[0] == self.student.bos)
        draft = _Draft(begins=begin > 0 or not prefix)
        special = [at for at in range(begin, len(ids)) if ids[at] in self.student.special]
        for at, stop in zip([begin - 1, *special], [*special, len(ids)], strict=True):
            if at >= begin:
                if ids[at] == self.student.unknown:
                    raise ValueError(f"token {at} is {self.student.special[ids[at]]!r}, whose text is not known")
                is_inner = at > begin or not draft.begins
                draft.parts.append((range(at, at + 1), self._special[is_inner][ids[at]]))
            if at + 1 < stop:
                before = ids[at] if at >= begin else None
                may_have_space = before is not None or draft.begins
                pieces = self.student.pieces(ids[at + 1 : stop])
                if may_have_space and self.student.adds_space(before):
                    draft.behind_space.append(at + 1)
                    if self.student.has_added_space(b"".join(pieces)):
                        pieces[0] = pieces[0][1:]
                text = _as_text(pieces, may_begin=at + 1 == begin, may_end=stop == len(ids))
                translated = [None] if before is None else self._special[True][before]
                adds_space = False  # whether the teacher puts a space before the text
                if translated == [None] or (len(translated) == 1 and translated[0] in self.teacher.special):
                    adds_space = self.teacher.adds_space(translated[0])
                text.is_inner = not (may_have_space and adds_space)
                draft.parts.append((range(at + 1, stop), text))
        return draft

    def _aligned(self, draft: _Draft) -> AlignedDocument:
        teacher_ids, spans = list(self.teacher.prefix if draft.begins else ()), list[AlignedSpan]()
        for tokens, part in draft.parts:
            first = len(teacher_ids)
            if not isinstance(part, _Text):
                teacher_ids += part
                spans += [AlignedSpan(tokens, range(first, len(teacher_ids)))] if part else []
                continue
            teacher_ids += part.ids
            pieces, expected = self.teacher.pieces(part.ids), part.text.encode()
            if (content := b"".join(pieces)) == b" " + expected:
                pieces[0] = pieces[0][1:]
            elif content != expected:
                at = next((n for n, pair in enumerate(zip(content, expected, strict=False)) if pair[0] != pair[1]), 0)
                shown = expected[max(0, at - 10) : at + 20].decode(errors="replace")
                raise ValueError(
                    f"the teacher's tokenizer changes the text near {shown!r}: expected one that keeps every text"
                )
            ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64) + part.first
            borders = np.intersect1d(np.append(0, part.ends), np.append(part.first, ends))
            cuts = list(zip(_cuts(part.ends, borders), _cuts(ends, borders, part.first), strict=True))
            for (start, teacher_start), (stop, teacher_stop) in pairwise(cuts):
                if start < stop and teacher_start < teacher_stop:
                    student = range(tokens.start + start, tokens.start + stop)
                    spans.append(AlignedSpan(student, range(first + teacher_start, first + teacher_stop)))
        return AlignedDocument(np.asarray(teacher_ids, dtype=np.int32), spans, frozenset(draft.behind_space))


def _as_text(pieces: list[bytes], *, may_begin: bool, may_end: bool) -> _Text:
    """The text of tokens with these bytes. may_begin, may_end: whether it may begin or end within a character."""
    content = b"".join(pieces)
    first = 0
    while may_begin and first < min(_MAX_CONTINUATION_BYTES, len(content)) and content[first] & 0xC0 == 0x80:
        first += 1
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content[first:], not may_end)
    except UnicodeDecodeError as error:
        raise ValueError(f"the student's tokens are not UTF-8 text: {error}") from error
    return _Text(text, np.cumsum([len(piece) for piece in pieces], dtype=np.int64), first)


def _cuts(ends: np.ndarray, borders: np.ndarray, first: int = 0) -> list[int]:
    """For each border, the number of tokens before it. A token without bytes at a border counts as after the border,
    except at the last border. ends: for each token, the number of bytes up to its end. first: the number of bytes
    before the first token.
    """
    before = np.where(borders <= first, 0, np.searchsorted(ends, borders) + 1)
    before[borders == (ends[-1] if len(ends) else first)] = len(ends)
    return before.tolist()
