"""Makes one teacher's prefixes (`substitutions.py`) from a template: `{column}` is replaced by the record's value.

The prefix is tokenized separately from the document.
"""

import json
import math
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.record import RecordError, column_value, describe, require_encodable, require_length
from stillhouse.data.render.templates import BosFrom, Encoded, Template
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.data.substitutions import Substitution

_EXPECTED = "expected a text in which {column} stands for a record's value, and {{ and }} for braces"


class PrefixTemplate:
    """template: a text in which `{column}` stands for a record's value; `{{` and `}}` are literal braces.

    Raises ValueError for all other features of Python's format strings, because a template must not access attributes
    of a value.
    """

    def __init__(self, teacher: str, template: str):
        self.what = f"the prefix of teacher {teacher!r}"
        #: pairs of a text and the column whose value follows the text (None: no value follows)
        self.parts: list[tuple[str, str | None]] = []
        try:
            parsed = list(Formatter().parse(template))
        except ValueError as error:
            raise ValueError(f"{self.what} {template!r} cannot be read ({error}): {_EXPECTED}") from error
        for literal, column, form, conversion in parsed:
            if column is not None and (form or conversion is not None or not column or set(column) & set(".[]{")):
                field = column + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                raise ValueError(
                    f"{self.what} {template!r} has {{{field}}}, which is not the name of a column: {_EXPECTED}"
                )
            self.parts.append((literal, column))

    def render(self, fields: Mapping[str, Any], template: Template) -> str:
        """The prefix of one record, as text. Raises RecordError if a column is missing or invalid."""
        try:
            text = "".join(
                literal + (_text(fields, column) if column is not None else "") for literal, column in self.parts
            )
            require_length(len(text), "it")
            rendered = template.render_prefix(text) if text else ""
            require_encodable(rendered, "it")
        except RecordError as error:
            raise RecordError(f"{self.what}: {error}") from error
        return rendered

    def encode(
        self,
        texts: Sequence[str],
        documents: Sequence[Encoded],
        tokenizer: PreTrainedTokenizerBase,
        bos_from: BosFrom,
    ) -> list[Substitution]:
        """Tokenize the rendered prefixes of these documents. Each of them stands for an empty span in front of one.

        bos_from: see `Template`. Raises RecordError as `tokenize` does.
        """
        bos = tokenizer.bos_token_id
        try:
            tokenized = tokenize(tokenizer, texts, special=False)
        except RecordError as error:
            raise RecordError(f"{self.what}: {error}") from error
        return [
            _behind_bos(np.asarray(ids, dtype=np.int32), document.ids, bos, bos_from)
            for ids, document in zip(tokenized, documents, strict=True)
        ]


def _behind_bos(ids: np.ndarray, document: np.ndarray, bos: int | None, bos_from: BosFrom) -> Substitution:
    """Remove a BOS from the prefix if prefix and document begin with a BOS."""
    if bos is None or bos_from is None or document[:1].tolist() != [bos]:
        return Substitution(0, 0, ids)
    both = ids[:1].tolist() == [bos]
    place = int(both or bos_from == "tokenizer")  # the tokenizer has put its BOS before the document alone
    return Substitution(place, place, ids[1:] if both else ids)


def _text(fields: Mapping[str, Any], column: str) -> str:
    value = column_value(fields, column)
    if isinstance(value, str):
        return value
    is_finite = not isinstance(value, float) or math.isfinite(value)
    if not isinstance(value, bool | int | float) or not is_finite:
        raise RecordError(f"'{column}' must be a string, a finite number or a boolean, got {describe(value)}")
    return json.dumps(value)
