"""Makes the substitutions for a teacher (see `substitutions.py`): its prefix, and its tokens of images.

A prefix is made from a template, in which `{column}` is replaced by the record's value. It is tokenized separately
from the document.

A teacher may have another processor of images than the student, or none. The text is rendered by the student's chat
template. In it, the placeholders of the student's processor are replaced by the placeholders of the teacher's
processor, which then tokenizes the text. So the teacher gets the image tokens that it was trained on, and all other
tokens must be the student's, which is checked for each document.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from string import Formatter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import MediaProcessor
from stillhouse.data.media_files import MediaFile
from stillhouse.data.record import (
    ProcessorError,
    RecordError,
    column_value,
    require_encodable,
    require_length,
    value_in_words,
)
from stillhouse.data.render.templates import BosFrom, Encoded, Span, Template
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.data.substitutions import Substitution

_EXPECTED = "expected a text with {column} for the value of a record's column, and with {{ and }} for braces"


class PrefixTemplate:
    """Makes a teacher's prefixes. template: a text with `{column}` in the place of a record's value; `{{` and `}}`
    are literal braces.

    Raises ValueError for all other features of Python's format strings, so that no template accesses attributes of a
    value.
    """

    def __init__(self, teacher: str, template: str):
        self.what = f"the prefix of teacher {teacher!r}"
        #: pairs of a text and the column whose value follows the text, or None if no value follows
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
            text = ""
            for literal, column in self.parts:
                value = "" if column is None else column_value(fields, column)
                is_finite = not isinstance(value, float) or math.isfinite(value)
                if not isinstance(value, str | bool | int | float) or not is_finite:
                    expected = "a string, a finite number or a boolean"
                    raise RecordError(f"'{column}' must be {expected}, got {value_in_words(value)}")
                text += literal + (value if isinstance(value, str) else json.dumps(value))
            require_length(len(text), "it")
            rendered = template.render_prefix(text) if text else ""
            require_encodable(rendered, "it")
        except RecordError as error:
            raise RecordError(f"{self.what}: {error}") from error
        return rendered

    def encode(
        self, texts: list[str], documents: list[Encoded], tokenizer: PreTrainedTokenizerBase, bos_from: BosFrom
    ) -> list[Substitution]:
        """Tokenize the rendered prefixes of these documents. A prefix replaces an empty span at the beginning of its
        document or after the BOS. bos_from: see `Template`. Raises RecordError as `tokenize` does.
        """
        bos = tokenizer.bos_token_id
        try:
            tokenized = tokenize(tokenizer, texts, special=False)
        except RecordError as error:
            raise RecordError(f"{self.what}: {error}") from error
        prefixes = []
        for ids, document in zip(tokenized, documents, strict=True):
            place = 0
            if bos is not None and bos_from is not None and document.ids[:1].tolist() == [bos]:
                # The prefix follows the document's BOS if the prefix has a BOS, too, which is then removed, or if the
                # tokenizer has added the document's BOS.
                place = int(ids[:1] == [bos] or bos_from == "tokenizer")
                ids = ids[1:] if ids[:1] == [bos] else ids
            prefixes.append(Substitution(place, place, np.asarray(ids, dtype=np.int32)))
        return prefixes


class TeacherMedia:
    """The images of documents as one teacher in this job reads them.

    section: the key of the teacher's section, for messages. processor: None if the teacher reads no images.
    is_routed: whether the teacher reads only documents that name it.
    """

    def __init__(
        self, section: str, student: MediaProcessor, processor: MediaProcessor | None, *, is_routed: bool = False
    ):
        self.section, self.student, self.processor, self.is_routed = section, student, processor, is_routed

    def identity(self) -> list[Any] | None:
        return None if self.processor is None else self.processor.identity()

    @cached_property
    def is_shared(self) -> bool:
        """Whether the teacher's processor makes the same tokens and pixels as the student's processor: it has the
        same settings, and makes the same tensors from random pictures. The first access loads both processors.
        """
        if self.processor is None:
            return False
        self.processor.prepare()
        self.student.prepare()
        if self.processor.pixels_identity != self.student.pixels_identity:
            return False
        pairs = zip(self.student.example_documents(), self.processor.example_documents(), strict=True)
        return all(
            one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
            for one, other in pairs
        )

    def substitutions(
        self, text: str, encoded: Encoded, images: Sequence[MediaFile], *, special: bool
    ) -> list[Substitution]:
        """The teacher's substitutions for the student's tokens of images.

        text: the document, with one placeholder of the student for each image.
        encoded: the document's tokens for the student.
        special: whether the tokenizer adds special tokens.

        Raises RecordError if the teacher's processor refuses an image, or if the other tokens differ from the
        student's. If the teacher has no processor, raises RecordError for a routed teacher, else ProcessorError.
        """
        if self.processor is None:
            kind = RecordError if self.is_routed else ProcessorError
            raise kind(
                f"the record has images, and its teacher has no processor of images ({self.section}.model): expected "
                "a vision-language teacher, or a column teachers.route that names it only for records without images"
            )
        if self.is_shared:
            return []
        placeholder = self.student.placeholder
        expanded = self.processor.expand(
            text.replace(placeholder, self.processor.placeholder), images, special=special, is_safe=True
        )
        ids, spans = np.asarray(expanded.ids, dtype=np.int32), expanded.media_spans()
        problem = text_problem(encoded.ids, encoded.media_spans, ids, spans)
        if problem:
            raise RecordError(
                f"the processor of {self.section}.model does not make the student's text tokens: {problem}: "
                "expected a teacher with the student's tokenizer and the same special tokens around a text"
            )
        return [
            Substitution(start, stop, ids[begin:end])
            for (start, stop), (begin, end) in zip(encoded.media_spans, spans, strict=True)
        ]


def text_problem(ids: np.ndarray, spans: Sequence[Span], other_ids: np.ndarray, other_spans: Sequence[Span]) -> str:
    """The first difference between two documents in the tokens outside of their images, or in the positions of the
    images among these tokens; "" if there is no difference.
    """
    if len(spans) != len(other_spans):
        return f"{len(other_spans)} images, not {len(spans)}"
    # np.split at all borders gives texts and images in turns, beginning with a text
    sides = (
        np.split(values, np.asarray(media_spans, dtype=np.int64).flatten())[::2]
        for values, media_spans in ((ids, spans), (other_ids, other_spans))
    )
    for number, (one, other) in enumerate(zip(*sides, strict=True)):
        place = f"after {number} images" if number else "before the first image"
        if len(one) != len(other):
            return f"{len(other)} tokens {place}, not {len(one)}"
        for at in np.flatnonzero(one != other)[:1]:
            return f"token {int(at) + 1} {place} is {other[at]}, not {one[at]}"
    return ""
