"""Puts the images of a record into its messages.

An image is a path (relative to the file of the records), the bytes of an image file, {"bytes", "path"} as `datasets`
writes it, or a data URL. It is the value of an image part of a message, or it is in the column `images` (or `image`).
In the second case, an image part without a value, or `<image>` in a text, marks the place of the image, as in TRL,
ms-swift and LLaVA. Without such a mark, the images are put before the text of the user's first turn, as in TRL.
"""

import base64
import re
from pathlib import Path
from typing import Any

from stillhouse.data.media_files import MAX_IMAGE_BYTES, MediaFile
from stillhouse.data.read.messages import MARK, Message, messages_of, with_parts
from stillhouse.data.read.reader import kind_of
from stillhouse.data.record import Record, RecordError, value_in_words
from stillhouse.display import name_list

Fields = dict[str, Any]
#: the maximum number of images of one record
MAX_IMAGES = 1000
_COLUMNS = ("images", "image")
_OTHER_MEDIA = ("videos", "video", "audios", "audio")
_MESSAGE_COLUMNS = ("messages", "prompt", "completion")
_SCHEME = re.compile(r"(?i)([a-z][a-z0-9+.-]*)://|data:")
_DATA_URL = re.compile(r"(?i)data:image/[\w.+-]*;base64,")


def with_images(record: Record) -> Record:
    """The record with the bytes of all images as values of image parts in its messages, and without columns of
    images. A record without images is returned unchanged. Raises RecordError for an unreadable image, for videos and
    audio, and if the number of marks differs from the number of images.
    """
    fields = record.fields
    by_column = {name: fields[name] for name in _COLUMNS if fields.get(name) not in (None, [], "")}
    if len(by_column) > 1:
        raise RecordError(f"the columns {name_list(by_column)} both have images: expected one of these columns")
    value: Any = next(iter(by_column.values()), [])
    listed = value if isinstance(value, list) else [value]
    columns = [column for column in _MESSAGE_COLUMNS if isinstance(fields.get(column), list)]
    for column in _OTHER_MEDIA:
        if fields.get(column):
            raise RecordError(f"'{column}' is not empty: expected only text and images")
    if not listed:
        turns = [message for column in columns for message in fields[column] if isinstance(message, dict)]
        contents = [message.get("content") for message in turns]
        parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        empty = next((name for name in _COLUMNS if name in fields), None)
        if empty is not None and any(isinstance(text, str) and MARK in text for text in texts):
            raise RecordError(f"a message has {MARK}, and '{empty}' is empty: expected an image for each {MARK}")
        if not any(isinstance(content, list) for content in contents):
            return record
    elif not columns:
        raise RecordError(
            f"the record has {len(listed)} images and no messages: expected 'messages', or 'prompt' and 'completion' "
            "as lists of messages; texts as strings cannot have images"
        )
    messages = {column: messages_of(fields, column) for column in columns}
    if listed:
        messages = _with_listed(messages, listed)
    images = [part for turns in messages.values() for part in _image_parts(turns)]
    if len(images) > MAX_IMAGES:
        raise RecordError(f"the record has {len(images):,} images: expected at most {MAX_IMAGES:,}")
    # the folder to which paths in the record are relative
    source = Path(record.where.rpartition(":")[0])
    folder = source if source.is_dir() else source.parent
    for number, part in enumerate(images, start=1):
        if "image" not in part:
            raise RecordError(f"image {number} has no value: expected a value, or a column 'images' with this image")
        try:
            part["image"] = _encoded(part["image"], folder)
        except RecordError as error:
            raise RecordError(f"image {number} {error}") from error
    kept = {name: value for name, value in fields.items() if name not in _COLUMNS}
    return Record(record.where, kept | messages)


def _image_parts(messages: list[Message]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for content in contents for part in content if part["type"] == "image"]


def _with_listed(messages: dict[str, list[Message]], images: list[Any]) -> dict[str, list[Message]]:
    """Put the images of a column into the messages: the parts get them as values, in the order of the marks."""
    marked = {column: [_with_marks(message) for message in turns] for column, turns in messages.items()}
    parts = [part for turns in marked.values() for part in _image_parts(turns)]
    if any("image" in part for part in parts):
        raise RecordError("there is a column of images and an image part with a value: expected one of them")
    if not parts:
        parts = [{"type": "image"} for _ in images]
        user = next((turn for turns in marked.values() for turn in turns if turn["role"] == "user"), None)
        if user is None or "content" not in user:
            raise RecordError("the record has images, but no turn of the user into which they could be put")
        user["content"] = [*parts, *user["content"]]
    if len(parts) != len(images):
        raise RecordError(
            f"the messages have {len(parts)} places for images ({MARK}, or image parts), and the record has "
            f"{len(images)} images: expected one place per image"
        )
    for part, image in zip(parts, images, strict=True):
        part["image"] = image
    return marked


def _with_marks(message: Message) -> Message:
    message = with_parts(message)
    if "content" not in message:
        return message
    content: list[dict[str, Any]] = []
    for part in message["content"]:
        if part["type"] != "text":
            content.append(part)
            continue
        for number, text in enumerate(part["text"].split(MARK)):
            content += [{"type": "image"}] if number else []
            content += [{"type": "text", "text": text}] if text else []
    return message | {"content": content}


def _encoded(value: Any, folder: Path) -> MediaFile:
    if isinstance(value, MediaFile):
        return value
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return MediaFile.of(value)
    if not (isinstance(value, str) and value):
        raise RecordError(f"is {value_in_words(value)}: expected a path, bytes, or a dict with 'bytes' or 'path'")
    if _DATA_URL.match(value):
        try:
            content = base64.b64decode(value.partition(",")[2], validate=True)
        except ValueError as error:
            raise RecordError(f"is not valid base64: {error}") from error
        return MediaFile.of(content)
    if scheme := _SCHEME.match(value):
        raise RecordError(
            f"is the URL {value[:80]!r}: expected a path, because nothing is downloaded"
            if scheme[1]
            else "is a data URL of another form: expected data:image/…;base64,…"
        )
    path = folder / value
    shown = f"({value[:200]!r})"
    try:
        if (kind := kind_of(path)) is not None:
            raise RecordError(f"{shown} is {kind}: expected a regular file")
        if (size := path.stat().st_size) > MAX_IMAGE_BYTES:
            raise RecordError(f"{shown} has {size:,} bytes: expected at most {MAX_IMAGE_BYTES:,}")
        return MediaFile.of(path.read_bytes(), str(path))
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(f"{shown} cannot be read: {error.strerror}") from error
    except ValueError as error:  # for example, a null character in the path
        raise RecordError(f"{shown} is not a path: {error}") from error
