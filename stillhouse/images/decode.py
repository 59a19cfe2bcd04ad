"""Decodes images of limited size in a process with limits of time and memory, and makes thumbnails."""

import base64
import io
import json
import math
import mmap
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stillhouse.data.media_files import MediaFile
from stillhouse.data.record import RecordError
from stillhouse.data.render.isolated_process import Isolated, LimitError
from stillhouse.libraries import imported, reading
from stillhouse.output.records import HeldOutImage

if TYPE_CHECKING:
    from PIL.Image import Image

#: the maximum number of pixels of an image: Pillow's limit against files whose decompression exceeds the memory
MAX_PIXELS = 1024**3 // 4 // 3
#: the maximum ratio of an image's longer side to its shorter side (the limit of Qwen's processors). Some processors
#: scale the shorter side to a fixed length, so that an image with a larger ratio could exceed the memory
MAX_ASPECT_RATIO = 200
#: the limits of processor time and memory for decoding one image
IMAGE_SECONDS, IMAGE_BYTES = 30.0, 2**32
#: the longest side of a thumbnail, in pixels
THUMBNAIL_SIDE = 160
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")


def open_image(data: bytes, most_pixels: int | None = None) -> "Image":
    """Decode an image to RGB as transformers' `load_image` does: EXIF's orientation is applied, the first frame of an
    animation is used, palettes are resolved, and the alpha channel is dropped. For 16 bits of grey, the 8 high bits
    are used. most_pixels: a larger image is scaled down to at most this number of pixels.

    Raises RecordError for an image that cannot be decoded completely or whose size `require_size` refuses, and
    ValueError if Pillow is not installed.
    """
    pillow = require_pillow()
    try:
        with reading("cannot be decoded", passes=pillow.UnidentifiedImageError):
            pillow.init()  # otherwise, Pillow knows only the usual formats
            image = pillow.open(io.BytesIO(data), formats=[name for name in FORMATS if name in pillow.OPEN])
        require_size(*image.size)
        with reading("cannot be decoded", passes=RecordError):
            image.load()
            # before Pillow 11.3, the mode of PNG files with 16 bits of grey is I
            has_16_bits = image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG")
            image = imported("PIL.ImageOps", "images").exif_transpose(image)
            if has_16_bits:
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise RecordError(f"has 32 bits per pixel (mode {image.mode}): expected 8 or 16 bits per channel")
            image = image.convert("RGB")
            if (size := _bounded(image.size, most_pixels)) != image.size:
                image = image.resize(size, resample=pillow.Resampling.BICUBIC)
            require_size(*image.size)  # again, because the sides were rounded
            return image
    except pillow.UnidentifiedImageError as error:
        raise RecordError(f"is not an image: expected one of {', '.join(FORMATS)}") from error
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(str(error)) from error


class IsolatedDecoder:
    """Calls `open_image` in a separate process with limits of time and memory.

    Decoding a small file, such as a JPEG with thousands of scans or a TIFF in which each row is a tile with a million
    columns, can take hours or all memory. A file that was decoded once within the limits needs no limits later.
    """

    def __init__(self, most_pixels: int | None = None):
        require_pillow().init()  # imports Pillow's modules before the fork
        # memory that is shared with the process, because sending pixels over a socket takes as long as decoding them
        self._pixels = mmap.mmap(-1, 3 * MAX_PIXELS)
        decode = partial(_write_pixels, self._pixels, most_pixels)
        self._isolated = Isolated(decode, seconds=IMAGE_SECONDS, memory_bytes=IMAGE_BYTES)

    def open(self, data: bytes) -> "Image":
        """Decode an image. Raises RecordError if `open_image` refuses it or if it exceeds the limits."""
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
    """Raise RecordError for a size above MAX_PIXELS or MAX_ASPECT_RATIO, which could exceed the memory."""
    if width * height > MAX_PIXELS:
        raise RecordError(f"has {width:,} × {height:,} pixels: expected at most {MAX_PIXELS:,} in all")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise RecordError(
            f"has {width:,} × {height:,} pixels: expected a longer side of at most {MAX_ASPECT_RATIO} times the "
            "shorter side"
        )


def pixel_count(image: MediaFile, most_pixels: int | None = None) -> int:
    """The number of pixels of the image that `open_image` returns, from the header of the file. Raises ValueError if
    the image cannot be read.
    """
    source = image.path if image.data is None else io.BytesIO(image.data)
    with reading(f"{image.path or 'an image'}: it cannot be read"), require_pillow().open(source) as opened:
        size = opened.size
    return math.prod(_bounded(size, most_pixels))


def _bounded(size: tuple[int, int], most_pixels: int | None) -> tuple[int, int]:
    """The width and height of an image after it is scaled down to at most `most_pixels` pixels."""
    width, height = size
    if most_pixels is None or width * height <= most_pixels:
        return size
    factor = math.sqrt(most_pixels / (width * height))
    # if one side is rounded up to one pixel, the other side must be limited, too
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


def thumbnail(image: MediaFile) -> HeldOutImage:
    """A small copy for a page. The decoded picture is encoded anew, so that no other content of the file gets into
    the page. Raises ValueError if the image cannot be read, or has changed since the data was loaded.
    """
    picture = open_image(image.read())
    width, height = picture.size
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    # a new image, because Pillow would also write the comment of the image file
    picture = require_pillow().fromarray(np.asarray(picture))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return HeldOutImage(width, height, f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")
