"""Documents with images as a teacher reads them that has another processor of images than the student, or none.

The teacher's processor gets the text that the student's chat template has rendered, with its own placeholder in place
of the student's. So its tokens of an image are those that it was trained on, and all others are the student's: this
is proven for each document, by its token ids.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import MediaProcessor
from stillhouse.data.media_files import MediaFile
from stillhouse.data.record import ProcessorError, RecordError
from stillhouse.data.render.assistant_turns import Span
from stillhouse.data.render.templates import Encoded
from stillhouse.data.substitutions import Substitution


class TeacherMedia:
    """The images of documents as one teacher in this job reads them.

    section: the key of the teacher's section, for messages.
    student, processor: the processors of the student and of the teacher; None if the teacher reads no images.
    is_routed: whether the teacher reads only documents that name it.
    """

    def __init__(
        self, section: str, student: MediaProcessor, processor: MediaProcessor | None, *, is_routed: bool = False
    ):
        self.section, self.student, self.processor, self.is_routed = section, student, processor, is_routed

    def identity(self) -> list[Any] | None:
        """See `MediaProcessor.identity`."""
        return None if self.processor is None else self.processor.identity()

    @cached_property
    def is_shared(self) -> bool:
        """Whether the teacher's processor makes the tokens and pixels of the student's: it has the same settings, and
        makes the same tensors of random pictures. Loads both processors.
        """
        if self.processor is None:
            return False
        self.processor.prepare()
        self.student.prepare()
        if self.processor.pixels_identity != self.student.pixels_identity:
            return False
        pairs = zip(self.student.example_documents(), self.processor.example_documents(), strict=True)
        return all(_are_equal(one, other) for one, other in pairs)

    def substitutions(
        self, text: str, encoded: Encoded, images: Sequence[MediaFile], *, special: bool
    ) -> list[Substitution]:
        """What the teacher reads in place of the student's tokens of images.

        text: the document, with one placeholder of the student for each image. encoded: its tokens for the student.
        special: whether the tokenizer adds special tokens. Raises RecordError for images that the teacher's processor
        refuses, and if the other tokens are not those of the student. For a teacher that reads no images, raises
        RecordError if the document names it, else ProcessorError.
        """
        if self.processor is None:
            kind = RecordError if self.is_routed else ProcessorError
            raise kind(
                f"it has images, and the teacher that reads it has no processor of images ({self.section}.model): "
                "expected a vision-language teacher, or teachers.route with this teacher for documents without images"
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
                f"the processor of {self.section}.model does not make the student's tokens of its text: {problem}: "
                "expected a teacher with the student's tokenizer, which adds the same special tokens"
            )
        return [
            Substitution(start, stop, ids[begin:end])
            for (start, stop), (begin, end) in zip(encoded.media_spans, spans, strict=True)
        ]


def not_read(encoded: Encoded) -> list[Substitution]:
    """A document that a teacher does not read at all."""
    return [Substitution(0, len(encoded.ids), np.empty(0, dtype=np.int32))]


def text_problem(ids: np.ndarray, spans: Sequence[Span], other_ids: np.ndarray, other_spans: Sequence[Span]) -> str:
    """The first difference between two documents without the tokens of their images; "" if there is none.

    The images must have the same places among the other tokens, too.
    """
    if len(spans) != len(other_spans):
        return f"{len(other_spans)} images, not {len(spans)}"
    parts = [_between(values, media_spans) for values, media_spans in ((ids, spans), (other_ids, other_spans))]
    for number, (one, other) in enumerate(zip(*parts, strict=True)):
        place = f"behind {number} images" if number else "before the first image"
        if len(one) != len(other):
            return f"{len(other)} tokens {place}, not {len(one)}"
        for at in np.flatnonzero(one != other)[:1]:
            return f"token {int(at) + 1} {place} is {other[at]}, not {one[at]}"
    return ""


def _between(ids: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
    """The tokens before, between and behind the spans."""
    starts, stops = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), len(ids)]
    return [ids[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
