"""Checks that the image tensors of requests could come from the served model's processor.

A server gets pixels, not image files. It runs its own processor on blank pictures of the sizes that the client sends.
The shapes, the integer tensors and the placeholder tokens depend only on the sizes, so they must equal those of the
blank pictures. The pixels must be finite. The client compares hashes of the processors and of the rotary positions.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import DocumentMedia, MediaInputs, MediaProcessor, find_media_processor
from stillhouse.data.media_files import MediaFile
from stillhouse.images.decode import MAX_PIXELS, require_pillow, require_size
from stillhouse.images.proof import document_positions
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.families import placeholder_ids
from stillhouse.serving.image_support import ImageSupport, positions_hash, processor_hash
from stillhouse.serving.server.gate import refused
from stillhouse.signals.scorer import proven_media_inputs

#: the maximum number of images of a request, and the maximum number of bytes of their tensors
MAX_IMAGES, IMAGE_BYTES = 256, 256 * 2**20
#: the pictures of a request may have the first number of pixels, plus the second number for each byte of their
#: tensors. Without this limit, a small request could make the server process large blank pictures, which takes much
#: memory and time. A processor that scales large pictures down to 336 × 336 pixels needs up to 65.3 pixels per byte
_FREE_PIXELS, _PIXELS_PER_BYTE = 2**20, 66
#: the maximum number of cached results of the processor for blank pictures
_REMEMBERED = 64
#: proves that a decoder reads images correctly, and returns the inputs of its model
Prove = Callable[[Decoder, MediaProcessor], MediaInputs]


class _Blank(NamedTuple):
    """The output of the processor for blank pictures.

    tokens: the tokens of each picture, from the first to the last placeholder.
    exact: the integer tensors. pixels: the shapes and dtypes of the floating-point tensors.
    """

    tokens: Sequence[np.ndarray]
    exact: Mapping[str, Tensor]
    pixels: Mapping[str, tuple[torch.Size, torch.dtype]]


class AcceptedImages:
    """The images that a server accepts.

    processor: the processor of the model, or None if the server accepts no images.
    inputs: makes the model's inputs; None without a processor.
    placeholder_ids: the placeholder tokens, which the model replaces by features of images, videos and audio.
    info: the field `images` of `GET /v1/info`. most_bytes: the maximum number of bytes of a request's image tensors.
    description: lines for the log.

    Raises ValueError, which names the model or the processor, if the server cannot accept images.
    """

    def __init__(self, decoder: Decoder, processor: MediaProcessor | None, prove: Prove = proven_media_inputs):
        self.inputs: MediaInputs | None = None
        self.placeholder_ids: Sequence[int] = ()
        self.info: dict[str, Any] = {"images": None}
        self.description: list[str] = []
        self.most_bytes = 0
        if processor is None:
            return
        self.inputs, self.most_bytes = prove(decoder, processor), IMAGE_BYTES
        self.placeholder_ids = sorted({*processor.placeholder_ids, *placeholder_ids(decoder.pretrained)})
        positions = [document_positions(decoder, document) for document in processor.example_documents()]
        support = ImageSupport(
            processor=processor_hash(processor),
            positions=positions_hash(positions),
            max_images=MAX_IMAGES,
            max_bytes=IMAGE_BYTES,
            max_pixels=MAX_PIXELS,
        )
        self.info = {"images": support.model_dump()}
        self.description = [f"images: at most {MAX_IMAGES:,} and {IMAGE_BYTES:,} bytes of their tensors per request"]
        self._lock, self._blank = Lock(), lru_cache(_REMEMBERED)(partial(_blank_of, processor))
        for tokens, encoded in processor.example_prompts():
            if encoded:  # check that integers and placeholders depend only on the sizes of pictures
                images = processor.read_files(encoded, tokens)
                self._check_images(tokens, DocumentMedia(b"", lambda images=images: images))  # type: ignore[misc]

    def check(self, documents: Sequence[tuple[np.ndarray, DocumentMedia | None]], param: str) -> None:
        """Raise RequestError unless images fit their documents. documents: the tokens and images (or None)
        of each document.
        """
        read = [images.read() for _, images in documents if images is not None]
        count = sum(len(images.sizes) for images in read)
        if self.inputs is None:
            if count:
                raise refused("a sequence has images, but this server was started without --images", param)
            return
        if count > MAX_IMAGES:
            raise refused(f"{count} images: expected at most {MAX_IMAGES} per request", param)
        pixels = sum(math.prod(size) for images in read for size in images.sizes)
        most = _FREE_PIXELS + _PIXELS_PER_BYTE * sum(t.nbytes for images in read for t in images.tensors.values())
        if pixels > most:
            raise refused(
                f"pictures of {pixels:,} pixels: expected at most {most:,} for tensors of this size; set "
                "data.image_pixels to scale the pictures down",
                param,
            )
        for number, (tokens, images) in enumerate(documents):
            try:
                if images is not None:
                    self._check_images(tokens, images)
                elif len(placeholders := tokens[np.isin(tokens, self.placeholder_ids)]):
                    feature = int(placeholders[0])
                    raise ValueError(f"token {feature} is a placeholder of images, but the sequence has no images")
            except ValueError as error:
                raise refused(f"sequence {number}: {error}", param) from error

    def _check_images(self, tokens: np.ndarray, images: DocumentMedia) -> None:
        assert self.inputs is not None
        tensors, sizes = images.read()
        for number, size in enumerate(sizes, start=1):
            with reading(f"picture {number}"):
                require_size(*size)
        if (pixels := sum(map(math.prod, sizes))) > MAX_PIXELS:  # the blank pictures will have as many
            raise ValueError(
                f"its pictures have {pixels:,} pixels: expected at most {MAX_PIXELS:,} in all; set "
                "data.image_pixels to scale the pictures down"
            )
        placeholders = int(np.isin(tokens, self.placeholder_ids).sum())
        if placeholders < len(sizes):
            raise ValueError(
                f"{placeholders} placeholder tokens for {len(sizes)} pictures: expected at least one for each picture"
            )
        with self._lock:  # one request at a time, because large pictures need much memory
            blank = self._blank(tuple(sizes))
        if tensors.keys() != blank.exact.keys() | blank.pixels.keys():
            raise ValueError(f"its images have {sorted(tensors)}: expected {sorted([*blank.exact, *blank.pixels])}")
        for name, tensor in tensors.items():
            if (exact := blank.exact.get(name)) is not None:
                if tensor.dtype != exact.dtype or not torch.equal(tensor, exact):
                    raise ValueError(f"'{name}' is not what the server's processor makes of pictures of these sizes")
                continue
            shape, dtype = blank.pixels[name]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise ValueError(
                    f"'{name}' is {tensor.dtype} of shape {list(tensor.shape)}: expected {dtype} of shape "
                    f"{list(shape)} for pictures of these sizes"
                )
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"'{name}' has values that are NaN or infinite")
        self._check_placeholders(tokens, blank.tokens)
        with reading("the model cannot compute positions for the tokens and images"):
            per_token = self.inputs.per_token(tokens, tensors)
        if any(len(values) != len(tokens) for values in per_token.values()):
            raise ValueError("the model does not compute one position for each token")

    def _check_placeholders(self, tokens: np.ndarray, expected: Sequence[np.ndarray]) -> None:
        """Raise ValueError unless the placeholder tokens are `expected`: the tokens of each picture, in order."""
        ids = self.placeholder_ids
        places, counts = np.flatnonzero(np.isin(tokens, ids)), [int(np.isin(of, ids).sum()) for of in expected]
        if len(places) != sum(counts):
            raise ValueError(
                f"{len(places)} placeholder tokens for images with {sum(counts)} features: expected the same number"
            )
        starts = np.cumsum([0, *counts[:-1]])
        for number, (start, picture_ids) in enumerate(zip(starts, expected, strict=True), start=1):
            first = places[start]
            if not np.array_equal(tokens[first : first + len(picture_ids)], picture_ids):
                raise ValueError(
                    f"picture {number} does not have the placeholder tokens that the server's processor makes"
                )


def _blank_of(processor: MediaProcessor, sizes: Sequence[tuple[int, int]]) -> _Blank:
    encoded, token = [], processor.placeholder
    for size in sizes:
        buffer = io.BytesIO()
        require_pillow().new("1", size).save(buffer, format="PNG", compress_level=1)
        encoded.append(MediaFile.of(buffer.getvalue()))
    with reading("the server's processor refuses pictures of these sizes"):
        expanded = processor.expand(" ".join([token] * len(sizes)), encoded, special=False, is_safe=True)
        ids = np.asarray(expanded.ids, dtype=np.int32)
        tensors = dict(processor.read_files(encoded, ids).tensors)
    placeholders = np.isin(ids, processor.placeholder_ids)
    tokens = []
    for number, (_, (begin, end)) in enumerate(expanded.replaced, start=1):
        inside = [begin <= start and stop <= end and start < stop for start, stop in expanded.offsets]
        places = np.flatnonzero(placeholders & np.array(inside))
        if not len(places):
            raise ValueError(f"the server's processor makes no placeholder token for picture {number}")
        tokens.append(ids[places[0] : places[-1] + 1])
    return _Blank(
        tokens,
        {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()},
        {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items() if tensor.is_floating_point()},
    )


def load_processor_of(folder: str, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor:
    """Return the processor of a model's folder. Raises ValueError if there is none, or if it cannot be used."""
    processor = find_media_processor(folder, tokenizer, template_is_set=True)  # a server does not use chat templates
    if processor is None:
        raise ValueError(f"--images: '{folder}' has no processor of images: expected processor_config.json in it")
    processor.prepare()
    return processor
