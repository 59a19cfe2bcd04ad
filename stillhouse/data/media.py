"""Media, such as images, that documents have in addition to their text, and the interface of add-ons that read media.

An add-on registers its kind of media as an entry point of `stillhouse.media`. The module of the entry point imports
little, and loads the add-on's other modules when a record or a model has media. The add-on's processor turns the
files of a document into placeholder tokens and tensors (`MediaProcessor`). The tensors keep the names of the model's
arguments.

S tokens of a document, A axes of rotary positions.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data.documents import Documents
from stillhouse.data.media_files import MediaFile
from stillhouse.data.record import Record
from stillhouse.data.render.templates import Span
from stillhouse.hashing import json_hash
from stillhouse.registry import load, load_all

#: the group of entry points
GROUP = "stillhouse.media"
#: the words for media in messages; the first word is also part of the names of stored fields
MEDIA, MEDIUM = "images", "an image"
#: the columns of records that contain media
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_MESSAGE_COLUMNS = ("messages", "prompt", "completion")

#: computes the rotary positions [S, A] of one document from its ids [S], its token types ([S] or None) and its media;
#: returns None for a model with one axis
AxisPositions = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], Tensor | None]


class MediaTensors(NamedTuple):
    """A document's media. tensors: arguments of the model. sizes: width and height of each picture."""

    tensors: Mapping[str, Tensor]
    sizes: Sequence[tuple[int, int]]


class Expanded(NamedTuple):
    """A text with its placeholders expanded. offsets: the characters of each token in the expanded text. replaced:
    for each file, the span of its placeholder in the original text and its span in the expanded text.
    """

    ids: list[int]
    offsets: list[Span]
    replaced: list[tuple[Span, Span]]

    def shifted(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """Convert spans of the original text to spans of the expanded text."""
        ends = [span[1] for span, _ in self.replaced]
        gained = [0, *(new[1] - span[1] for span, new in self.replaced)]
        moved = (tuple(at + gained[bisect_right(ends, at)] for at in span) for span in spans)
        return tuple((begin, end) for begin, end in moved)

    def media_spans(self) -> tuple[Span, ...]:
        """The tokens of each file: all tokens that the processor wrote in place of the file's placeholder."""
        begins_S, ends_S = np.asarray(self.offsets, dtype=np.int64).reshape(-1, 2).T
        by_file = [np.flatnonzero((begins_S < end) & (ends_S > begin)) for _, (begin, end) in self.replaced]
        return tuple((int(places[0]), int(places[-1]) + 1) for places in by_file)


class MediaProcessor(Protocol):
    """The processor with which a model reads media. It is loaded when the first file is read.

    kind: the name under which the add-on is registered. files: the files from which the processor is loaded.
    placeholder: the text that marks the place of a file. placeholder_ids: the ids of the tokens whose embeddings the
        features of media replace.
    pixels_identity: a hash of all settings that determine the tensors of a file. It does not depend on the tokens.
    """

    kind: str
    files: Sequence[Path]
    tokenizer: PreTrainedTokenizerBase

    @property
    def placeholder(self) -> str: ...
    @property
    def placeholder_ids(self) -> list[int]: ...
    @property
    def pixels_identity(self) -> str: ...

    def identity(self) -> list[Any]:
        """Everything except `versions` that determines the tokens and tensors of a file."""

    def versions(self) -> list[Any]:
        """The versions of the libraries and of the code that read files."""

    def prepare(self) -> None:
        """Load and prove the processor. Raises ProcessorError if it cannot be used."""

    def expand(self, text: str, files: Sequence[MediaFile], *, special: bool, is_safe: bool = False) -> Expanded:
        """Tokenize a text with one placeholder for each file. special: whether the tokenizer adds special tokens.
        is_safe: whether the files were decoded before, so that decoding them needs no process with limits. Raises
        RecordError for files that cannot be read, or a text with other placeholders.
        """

    def read(self, documents: Documents, document: int, ids: np.ndarray) -> MediaTensors:
        """The tensors of a document. ids: the tokens that the model reads. Raises DataError for a changed file."""

    def read_files(self, files: Sequence[MediaFile], ids: np.ndarray) -> MediaTensors:
        """Like `read`, for given files and the ids of their document. Raises ValueError in place of DataError."""

    def join(self, documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Join the tensors of several documents for a micro-batch. The result is empty if no document has media."""

    def token_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """The token types of a document, [S] int64, by the argument's name; empty if the model has none."""

    def example_documents(self) -> list[dict[str, Tensor]]:
        """Example documents with one file, two files and no file, as the processor returns them: tensors [1, S]."""

    def example_prompts(self) -> list[tuple[np.ndarray, list[MediaFile]]]:
        """Example prompts with two files, one file and no file, each as token ids and files."""

    def prompt_arguments(self, decoder: Any, requests: Sequence[Any], width: int) -> dict[str, Tensor]:
        """The arguments of transformers' `generate` for `GenerationRequest`s. width: the longest prompt's length."""

    def check_texts(self, documents: Documents) -> None:
        """Raise DataError for a document without media that has a placeholder token."""

    def in_words(self, documents: Documents, document: int) -> str:
        """A description of a document's media, with the numbers of their tokens."""

    def shortened(self, text: str) -> str:
        """The text with each long repetition of a placeholder token shortened to one token and a count."""


def media_kind(processor: MediaProcessor) -> Any:
    """The add-on of a processor (see `images/__init__.py`)."""
    return load(GROUP, processor.kind)


def find_media_processor(
    name_or_path: str, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> MediaProcessor | None:
    """The processor of a folder or a hub id; None if it has no processor. options: see `ImageProcessor`."""
    processors = (kind.find_processor(name_or_path, tokenizer, **options) for kind in load_all(GROUP).values())
    return next((processor for processor in processors if processor is not None), None)


def with_media(record: Record) -> Record:
    """The record with its media in its messages: parts have files as values, and the columns of media are removed.

    Raises RecordError for a file that cannot be read, for files without a place in the messages, and for media that
    no add-on reads.
    """
    columns = (record.fields.get(name) for name in _MESSAGE_COLUMNS)
    messages = [message for column in columns if isinstance(column, list) for message in column]
    has_parts = any(isinstance(item, dict) and isinstance(item.get("content"), list) for item in messages)
    if has_parts or any(name in record.fields for name in MEDIA_COLUMNS):
        for kind in load_all(GROUP).values():
            record = kind.with_files(record)
    return record


def shown_positions(ids: np.ndarray, processor: MediaProcessor | None) -> np.ndarray:
    """The positions of the tokens to show: all tokens, but only the first token of each run of placeholders."""
    is_placeholder = np.isin(ids, [] if processor is None else processor.placeholder_ids)
    return np.flatnonzero(~is_placeholder | ~np.concatenate([[False], is_placeholder[:-1]]))


def shown_text(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, processor: MediaProcessor | None) -> str:
    return str(tokenizer.decode(ids[shown_positions(ids, processor)].tolist()))


def media_end(ids: np.ndarray, processor: MediaProcessor | None) -> int:
    """The length of the shortest prefix of `ids` with all media and one token after them; 0 if there are no media."""
    places = np.flatnonzero(np.isin(ids, [] if processor is None else processor.placeholder_ids))
    return int(places[-1]) + 2 if len(places) else 0


def shown_media(files: Sequence[MediaFile], processor: MediaProcessor | None) -> dict[str, Any]:
    """The fields with which a record of the HTML page shows a document's files; empty if there are none."""
    return {} if processor is None or not files else media_kind(processor).shown(files)


@dataclass(frozen=True, eq=False)
class DocumentMedia:
    """The media of a document, for a model that reads this document alone.

    identity: a hash of the encoded files and of everything that determines their tensors. read: a function that makes
    the tensors; it raises DataError if a file has changed. placeholder_ids: see `MediaProcessor`.
    """

    identity: bytes
    read: Callable[[], MediaTensors]
    placeholder_ids: Sequence[int] = ()


class MediaInputs:
    """Makes the inputs of a micro-batch that come from media.

    teachers: the `MediaInputs` of each teacher in this job that has another processor than the student, or None for a
        teacher that reads no media, by name. All other teachers read the student's inputs.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        axis_positions: AxisPositions | None = None,
        teachers: "Mapping[str, MediaInputs | None] | None" = None,
    ):
        self.processor, self.axis_positions, self.teachers = processor, axis_positions, dict(teachers or {})

    def tensors(
        self, documents: Documents, members: Sequence[int], ids_M: Sequence[np.ndarray], *, may_skip: bool = False
    ) -> list[dict[str, Tensor]]:
        """The tensors of the media of each document. ids_M: the tokens that the model reads for each document.
        may_skip: whether the model is a teacher that does not read some of the documents. Documents without a
        placeholder then get no tensors. If it is false, a document with media and no placeholder raises DataError.
        """
        return [
            {}
            if may_skip and not np.isin(ids, self.processor.placeholder_ids).any()
            else dict(self.processor.read(documents, member, ids).tensors)
            for member, ids in zip(members, ids_M, strict=True)
        ]

    def of(self, documents: Documents, document: int) -> DocumentMedia | None:
        """The media of one document; None if it has no media."""
        files = documents.media_of(document)
        if not files:
            return None
        hashes = [self.processor.pixels_identity, *(file.sha256.hex() for file in files)]
        return DocumentMedia(
            bytes.fromhex(json_hash(hashes)),
            partial(self.processor.read, documents, document, documents.tokens(document)),
            self.processor.placeholder_ids,
        )

    def per_token(self, ids: np.ndarray, media: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """The inputs per token of one document: token types [S] and axis positions [S, A], if the model has them."""
        inputs = self.processor.token_types(ids)
        if self.axis_positions is not None:
            types_S = next(map(torch.from_numpy, inputs.values()), None)
            positions_SA = self.axis_positions(torch.from_numpy(ids.astype(np.int64)), types_S, media)
            if positions_SA is not None:
                inputs["axis_position_ids"] = positions_SA.numpy()
        return inputs
