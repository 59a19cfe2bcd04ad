"""Prefixes: text that one teacher reads in front of a document, and that the student does not see.

A prefix is privileged context, such as the answer to a question. Its template names columns in braces, and every
record fills it with its own values. The prefix is tokenized by itself and put in front of the document's tokens,
which stay as they are: so a row of the student and a row of the teacher predict the same token. A BOS at the
beginning of the document stays in front of both.

D documents; N tokens of all prefixes, concatenated.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.reading import describe
from stillhouse.data.templates import (
    BosFrom,
    Encoded,
    RecordError,
    Template,
    check_encodable,
    check_length,
    column_value,
    tokenize,
)


@dataclass(frozen=True)
class EncodedPrefix:
    """ids: token ids, [n] int32. after_bos: the document's first token is a BOS, which stays in front of them."""

    ids: np.ndarray
    after_bos: bool

    def for_piece(self, number: int) -> "EncodedPrefix":
        """The prefix of a piece of the document. Only the first piece, number 0, begins with the document's BOS."""
        return replace(self, after_bos=self.after_bos and number == 0)


@dataclass(frozen=True)
class Prefixes:
    """One teacher's prefixes of D documents, concatenated.

    tokens_N: int32. offsets: [D+1] int64, the prefix of document d is `offsets[d]:offsets[d+1]`. after_bos_D: bool,
    whether the document's first token is a BOS, which stays in front of the prefix.
    """

    tokens_N: np.ndarray
    offsets: np.ndarray
    after_bos_D: np.ndarray

    @classmethod
    def of(cls, prefixes: Sequence[EncodedPrefix]) -> "Prefixes":
        """The prefixes of documents in this order."""
        return cls(
            np.concatenate([each.ids for each in prefixes]),
            offsets_of([len(each.ids) for each in prefixes]),
            np.asarray([each.after_bos for each in prefixes], dtype=bool),
        )

    @classmethod
    def joined(cls, parts: Sequence["Prefixes"]) -> "Prefixes":
        """The prefixes of several parts, one part after the other."""
        lengths_D = np.concatenate([each.lengths_D for each in parts])
        return cls(
            np.concatenate([each.tokens_N for each in parts]),
            offsets_of(lengths_D),
            np.concatenate([each.after_bos_D for each in parts]),
        )

    @property
    def lengths_D(self) -> np.ndarray:
        """Tokens per prefix, int64."""
        return np.diff(self.offsets)

    def tokens(self, document: int) -> np.ndarray:
        """The token ids of one document's prefix."""
        return self.tokens_N[self.offsets[document] : self.offsets[document + 1]]

    def before(self, document: int, ids: np.ndarray) -> np.ndarray:
        """All ids that the teacher reads of a document with these ids of its own.

        With a BOS or without it, row i of the document is row `lengths_D[document] + i` of the teacher: both predict
        the document's token i + 1.
        """
        front = int(self.after_bos_D[document])
        return np.concatenate([ids[:front], self.tokens(document), ids[front:]])

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Prefixes":
        """The prefixes of the chosen documents, in the given order."""
        offsets, index_N = chosen_tokens(self.offsets, chosen)
        return Prefixes(self.tokens_N[index_N], offsets, self.after_bos_D[chosen])


class PrefixTemplate:
    """Makes one teacher's prefixes. template: a text in which `{column}` stands for a record's value.

    `{{` and `}}` are braces. Raises ValueError for anything else that Python's format strings allow: a template must
    not reach into the attributes of a value.
    """

    def __init__(self, teacher: str, template: str):
        self.what = f"the prefix of teacher {teacher!r}"
        self.parts = _parsed(self.what, template)

    def render(self, fields: Mapping[str, Any], template: Template) -> str:
        """The prefix of one record, as text. Raises RecordError if the record does not have what it needs."""
        try:
            text = "".join(
                literal + (_text(fields, column) if column is not None else "") for literal, column in self.parts
            )
            check_length(len(text), "it")
            rendered = template.render_prefix(text) if text else ""
            check_encodable(rendered, "it")
        except RecordError as error:
            raise RecordError(f"{self.what}: {error}") from error
        return rendered

    def encode(
        self,
        texts: Sequence[str],
        documents: Sequence[Encoded],
        tokenizer: PreTrainedTokenizerBase,
        bos_from: BosFrom,
    ) -> list[EncodedPrefix]:
        """The tokens of the rendered prefixes of these documents, which begin with a BOS or not (see `Template`)."""
        bos = tokenizer.bos_token_id
        return [
            _joined(np.asarray(ids, dtype=np.int32), document.ids, bos, bos_from)
            for ids, document in zip(tokenize(tokenizer, list(texts), special=False), documents, strict=True)
        ]


def _joined(ids: np.ndarray, document: np.ndarray, bos: int | None, bos_from: BosFrom) -> EncodedPrefix:
    """The prefix in front of a document. The BOS that both begin with is left to the document."""
    if bos is None or bos_from is None or document[:1].tolist() != [bos]:
        return EncodedPrefix(ids, after_bos=False)
    if bos_from == "tokenizer":  # the prefix was tokenized without it
        return EncodedPrefix(ids, after_bos=True)
    both = ids[:1].tolist() == [bos]
    return EncodedPrefix(ids[1:] if both else ids, after_bos=both)


def _parsed(what: str, template: str) -> list[tuple[str, str | None]]:
    """Pairs of a text and the column whose value follows it (None: nothing follows)."""
    expected = "expected a text in which {column} stands for a record's value, and {{ and }} for braces"
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{what} {template!r} cannot be read ({error}): {expected}") from error
    for _, column, form, conversion in parsed:
        if column is not None and (form or conversion is not None or not column or set(column) & set(".[]{")):
            found = column + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{what} {template!r} has {{{found}}}, which is not the name of a column: {expected}")
    return [(literal, column) for literal, column, _, _ in parsed]


def _text(fields: Mapping[str, Any], column: str) -> str:
    value = column_value(fields, column)
    if isinstance(value, str):
        return value
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, bool | int | float) or not is_finite:
        raise RecordError(f"'{column}' must be a string, a finite number or a boolean, got {describe(value)}")
    return json.dumps(value)


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[D+1] int64: where each of D consecutive parts of these lengths begins, and the end of the last one."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def chosen_tokens(offsets: np.ndarray, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The offsets of the chosen ones of consecutive parts in their new order, and the numbers of their tokens."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = offsets_of(lengths)
    shift_N = np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return new_offsets, np.arange(new_offsets[-1]) + shift_N
