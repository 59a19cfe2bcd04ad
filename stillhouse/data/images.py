"""The images of documents, encoded as in their files. Pixels exist only while a micro-batch is built.

D documents; I images of all documents, in the order of their placeholders.
"""

import base64
import hashlib
import io
import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow

from stillhouse.data.offsets import chosen_tokens, offsets_of
from stillhouse.data.record import RecordError
from stillhouse.data.render.isolated_process import Isolated, LimitError
from stillhouse.libraries import imported, reading

if TYPE_CHECKING:
    from PIL.Image import Image

#: the most pixels of an image: Pillow's limit against files that decompress to more than the memory
MAX_PIXELS = 1024**3 // 4 // 3
#: the most that the longer side of an image may have of the shorter one, as for Qwen's processors: a processor that
#: gives the shorter side a fixed length would make more pixels of a longer image than the memory holds
MAX_ASPECT_RATIO = 200
#: limits of processor time and memory for decoding one image
IMAGE_SECONDS, IMAGE_BYTES = 30.0, 2**32
#: the most bytes of an encoded image
MAX_IMAGE_BYTES = 64 * 2**20
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
_SCHEMA = pyarrow.schema(
    [("path", pyarrow.large_string()), ("sha256", pyarrow.binary(32)), ("data", pyarrow.large_binary())]
)


@dataclass(frozen=True)
class EncodedImage:
    """An image as it is encoded in its file.

    data: the bytes; None if they are read from `path` when they are used.
    sha256: the hash of the bytes when the data was loaded.
    path: the file; None if the bytes are part of the record.
    """

    sha256: bytes
    path: str | None
    data: bytes | None = field(repr=False)

    @classmethod
    def of(cls, data: bytes, path: str | None = None) -> "EncodedImage":
        """Raises RecordError for more than `MAX_IMAGE_BYTES`."""
        if len(data) > MAX_IMAGE_BYTES:
            raise RecordError(f"has {len(data):,} bytes: expected at most {MAX_IMAGE_BYTES:,}")
        return cls(hashlib.sha256(data).digest(), path, data)

    @property
    def as_stored(self) -> "EncodedImage":
        """The image without bytes that its file has."""
        return self if self.path is None else EncodedImage(self.sha256, self.path, None)

    def as_json(self) -> list[str | None]:
        data = None if self.data is None else base64.b64encode(self.data).decode()
        return [self.sha256.hex(), self.path, data]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        sha256, path, data = values
        return cls(bytes.fromhex(sha256), path, None if data is None else base64.b64decode(data))

    def read(self) -> bytes:
        """The bytes. Raises ValueError if the file is missing, or has other bytes than when the data was loaded."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        try:
            data = Path(self.path).read_bytes()
        except OSError as error:
            raise ValueError(
                f"{self.path}: the image cannot be read ({error.strerror}), but it could when the data was loaded: "
                "restore the file, or start again without the entry of data.cache that names it"
            ) from error
        if hashlib.sha256(data).digest() != self.sha256:
            raise ValueError(
                f"{self.path}: the image has other bytes than when the data was loaded and tokenized: restore the "
                "file, or start again without the entry of data.cache that names it"
            )
        return data


def open_image(data: bytes, most_pixels: int | None = None) -> "Image":
    """Decode an image to RGB as transformers' `load_image` does: EXIF's orientation is applied, the first frame of an
    animation is used, palettes are resolved, and the alpha channel is dropped. Of 16 bits of grey, the 8 high ones
    are used.

    most_pixels: a larger image is scaled down to at most this number of pixels.

    Raises RecordError for an image that cannot be decoded completely, that has more than `MAX_PIXELS` or another form
    than `require_size` accepts, and ValueError if Pillow is not installed.
    """
    pillow = require_pillow()
    try:
        with reading("cannot be decoded", passes=pillow.UnidentifiedImageError):
            pillow.init()  # without it, only the usual formats are known
            image = pillow.open(io.BytesIO(data), formats=[name for name in FORMATS if name in pillow.OPEN])
        require_size(*image.size)
        with reading("cannot be decoded", passes=RecordError):
            return _decoded(image, most_pixels)
    except pillow.UnidentifiedImageError as error:
        raise RecordError(f"is not an image: expected one of {', '.join(FORMATS)}") from error
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error)) from error


def _decoded(image: "Image", most_pixels: int | None) -> "Image":
    image.load()
    # before Pillow 11.3, PNG files with 16 bits of grey have the mode I
    has_16_bits = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
    image = imported("PIL.ImageOps", "images").exif_transpose(image)
    if has_16_bits:
        image = require_pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise RecordError(f"has 32 bits per pixel (mode {image.mode}): expected 8 or 16 per channel")
    image = image.convert("RGB")
    if most_pixels is not None:
        image = _scaled_down(image, most_pixels)
        require_size(*image.size)  # the sides were rounded
    return image


class IsolatedDecoder:
    """`open_image` in a separate process with limits of time and memory.

    Small files may need hours or all memory: a JPEG with thousands of scans, or a TIFF in which each row is a tile
    with a million columns. What was decoded within the limits once needs no second proof.
    """

    def __init__(self, most_pixels: int | None = None):
        require_pillow().init()  # imports its modules before the fork
        # shared with the process, because a socket takes as long as decoding
        self._pixels = mmap.mmap(-1, 3 * MAX_PIXELS)
        decode = partial(_write_pixels, self._pixels, most_pixels)
        self._isolated = Isolated(decode, seconds=IMAGE_SECONDS, memory_bytes=IMAGE_BYTES)

    def open(self, data: bytes) -> "Image":
        """Raises RecordError for an image that `open_image` refuses or that exceeds the limits."""
        try:
            width, height, problem = json.loads(self._isolated(data))
        except LimitError as error:
            raise RecordError(f"cannot be decoded: {error}") from error
        if problem:
            raise RecordError(problem)
        with memoryview(self._pixels) as pixels, pixels[: 3 * width * height] as used:
            return require_pillow().frombytes("RGB", (width, height), used)


def _write_pixels(pixels: mmap.mmap, most_pixels: int | None, data: bytes) -> bytes:
    """Write the decoded pixels, and return the width, the height and an error as JSON."""
    try:
        image = open_image(data, most_pixels)
        content = image.tobytes()
    except (RecordError, MemoryError) as error:
        problem = str(error) or "cannot be decoded: its pixels need too much memory"
        return json.dumps([0, 0, problem]).encode()
    pixels[: len(content)] = content
    return json.dumps([*image.size, ""]).encode()


def require_size(width: int, height: int) -> None:
    """Raise RecordError for an image whose pixels, or those that a processor makes of it, need too much memory."""
    if width * height > MAX_PIXELS:
        raise RecordError(f"has {width:,} × {height:,} pixels: expected at most {MAX_PIXELS:,} in all")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RecordError(
            f"has {width:,} × {height:,} pixels: expected a longer side of at most {MAX_ASPECT_RATIO} times the "
            "shorter one"
        )


def pixel_count(image: EncodedImage, most_pixels: int | None = None) -> int:
    """The number of pixels of an image as `open_image` returns it, from the head of its file.

    Raises ValueError if it cannot be read.
    """
    source = image.path if image.data is None else io.BytesIO(image.data)
    with reading(f"{image.path or 'an image'}: it cannot be read"), require_pillow().open(source) as opened:
        size = opened.size
    return math.prod(size if most_pixels is None else _bounded(size, most_pixels))


def _scaled_down(image: "Image", most_pixels: int) -> "Image":
    size = _bounded(image.size, most_pixels)
    return image if size == image.size else image.resize(size, resample=require_pillow().Resampling.BICUBIC)


def _bounded(size: tuple[int, int], most_pixels: int) -> tuple[int, int]:
    """Width and height, scaled down to at most this number of pixels."""
    width, height = size
    if width * height <= most_pixels:
        return size
    factor = math.sqrt(most_pixels / (width * height))
    # a side of one pixel leaves all others to the other side
    width, height = (min(max(1, int(side * factor)), most_pixels) for side in size)
    return width, height


def require_pillow():  # type: ignore[no-untyped-def]
    """Pillow's module PIL.Image. Raises ValueError if it is not installed."""
    try:
        import PIL.Image
    except ModuleNotFoundError as error:
        raise ValueError(
            "the data has images, but Pillow is not installed: pip install 'stillhouse[images]'"
        ) from error
    return PIL.Image


def pillow_version() -> str | None:
    """The version of Pillow; None if it is not installed."""
    try:
        return version("pillow")
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Images:
    """The images of D documents.

    table: columns path, sha256 and data; maybe memory-mapped.
    rows_I: the row of each image in the table, int64.
    offsets: [D+1] int64, the images of document d are `offsets[d]:offsets[d+1]`.
    """

    table: pyarrow.Table
    rows_I: np.ndarray
    offsets: np.ndarray

    @classmethod
    def stored(cls, table: pyarrow.Table, offsets: np.ndarray) -> "Images":
        """The images of a table, in its order."""
        return cls(table, np.arange(offsets[-1]), offsets)

    @classmethod
    def joined(cls, parts: Sequence["Images"]) -> "Images":
        """Concatenate the images of several sets of documents."""
        starts = offsets_of([len(part.table) for part in parts])
        return cls(
            pyarrow.concat_tables([part.table for part in parts]),
            np.concatenate([part.rows_I + start for part, start in zip(parts, starts, strict=False)]),
            offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        )

    @classmethod
    def none(cls, documents: int) -> "Images":
        """No images for this number of documents."""
        return cls(_SCHEMA.empty_table(), np.empty(0, dtype=np.int64), np.zeros(documents + 1, dtype=np.int64))

    def select(self, chosen: Sequence[int] | np.ndarray) -> "Images":
        """The images of the chosen documents, in the given order."""
        offsets, index_I = chosen_tokens(self.offsets, chosen)
        return Images(self.table, self.rows_I[index_I], offsets)

    def of(self, document: int) -> list[EncodedImage]:
        """The images of one document."""
        return [self._image(int(row)) for row in self.rows_I[self.offsets[document] : self.offsets[document + 1]]]

    def hashes(self) -> bytes:
        """The hashes of all images in the order of the documents."""
        return b"".join(self.table.column("sha256")[int(row)].as_py() for row in self.rows_I)

    def _image(self, row: int) -> EncodedImage:
        path, sha256, data = (self.table.column(name)[row].as_py() for name in _SCHEMA.names)
        return EncodedImage(sha256, path, data)


class ImageWriter:
    """Writes images to an Arrow file, or to memory. path: None for memory."""

    def __init__(self, path: Path | None):
        self.path = path
        self._sink = pyarrow.BufferOutputStream() if path is None else pyarrow.OSFile(str(path), "wb")
        self._writer = pyarrow.ipc.new_file(self._sink, _SCHEMA)
        self.counts: list[int] = []  # of each document
        self._closed = False

    def add(self, images: Sequence[EncodedImage]) -> None:
        """Write the images of the next document."""
        self.counts.append(len(images))
        if images:
            stored = [image.as_stored for image in images]
            columns = [[getattr(image, name) for image in stored] for name in _SCHEMA.names]
            arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, _SCHEMA.types, strict=True)]
            self._writer.write_batch(pyarrow.record_batch(arrays, schema=_SCHEMA))

    def finish(self) -> Images:
        """Read back all images."""
        self.close()
        source = pyarrow.BufferReader(self._sink.getvalue()) if self.path is None else self.path
        return Images.stored(image_table(source), offsets_of(self.counts))

    def close(self) -> None:
        """Complete the file. A second call does nothing."""
        if not self._closed:
            self._writer.close()
            if self.path is not None:
                self._sink.close()
        self._closed = True


def image_table(source: Path | pyarrow.BufferReader) -> pyarrow.Table:
    """The table of an Arrow file of images. A file on disk is memory-mapped."""
    file = pyarrow.memory_map(str(source)) if isinstance(source, Path) else source
    return pyarrow.ipc.open_file(file).read_all()
