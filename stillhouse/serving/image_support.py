"""The images that a server accepts: their description in `GET /v1/info`, and the client's check of its images."""

from collections.abc import Sequence

import numpy as np
from pydantic import ConfigDict
from torch import Tensor

from stillhouse.data import DataError, Documents
from stillhouse.data.media import MediaProcessor
from stillhouse.hashing import json_hash
from stillhouse.images.decode import MAX_PIXELS, pixel_count
from stillhouse.images.processor import ImageProcessor
from stillhouse.serving.wire import StrictBody


class ImageSupport(StrictBody):
    """processor, positions: the `processor_hash` of the server's processor, and the `positions_hash` of its model.
    max_images, max_bytes: the most images of a request, and the most bytes of their tensors.
    max_pixels: the most pixels of all images of a sequence, or None if an older server does not report it.
    """

    model_config = ConfigDict(extra="ignore")

    processor: str
    positions: str
    max_images: int
    max_bytes: int
    max_pixels: int | None = None


def processor_hash(processor: MediaProcessor) -> str:
    """A hash of a processor's settings, and of the tokens, shapes and integers that it makes of example pictures. The
    hash does not include pixels, because their last bits depend on the machine.
    """
    documents = [
        {
            name: tensor.tolist() if not tensor.is_floating_point() else [list(tensor.shape), str(tensor.dtype)]
            for name, tensor in document.items()
        }
        for document in processor.example_documents()
    ]
    assert isinstance(processor, ImageProcessor), "media that servers do not read"
    return json_hash([processor.processor.image_processor.to_dict(), processor.placeholder_ids, documents])


def positions_hash(positions: Sequence[Tensor | None]) -> str:
    """A hash of the rotary positions [S, A] that a model gives to the processor's `example_documents`."""
    return json_hash([None if positions_SA is None else positions_SA.tolist() for positions_SA in positions])


def require_accepted(
    url: str, support: ImageSupport | None, documents: Documents, processor: MediaProcessor, what: str
) -> None:
    """Raise ValueError unless the server accepts images and has this processor. Raise DataError for the first
    document with more images or pixels than the server accepts.

    documents: documents, some of which have images. what: the name of the documents in errors.
    """
    if support is None:
        raise ValueError(f"{what} has images, and {url} accepts none: start it with stillhouse serve --images")
    if support.processor != processor_hash(processor):
        raise ValueError(
            f"{what} has images, and the model of {url} has another processor of images than student.model: expected "
            "the processor of the student, with the same versions of transformers and torch on both sides"
        )
    assert isinstance(processor, ImageProcessor), "media that servers do not read"
    assert documents.media is not None

    def require(document: int, size: int, limit: int, unit: str) -> None:
        if size > limit:
            raise DataError(
                documents.sources[document],
                f"{size:,} {unit} of {what}, but {url} accepts at most {limit:,} in a request: expected fewer "
                "images, or data.image_pixels, which scales them down",
            )

    counts_D = np.diff(documents.media.offsets)
    for document in np.flatnonzero(counts_D > support.max_images).tolist():
        require(document, int(counts_D[document]), support.max_images, "images")
    if support.max_pixels is not None:
        largest_pixels = MAX_PIXELS if processor.most_pixels is None else processor.most_pixels
        # image files are opened only if the number of images does not guarantee that the pixels are within the limit
        for document in np.flatnonzero(counts_D * largest_pixels > support.max_pixels).tolist():
            pixels = sum(pixel_count(image, processor.most_pixels) for image in documents.media.of(document))
            require(document, pixels, support.max_pixels, "pixels in the images")
    # the size of tensors is known only after processing, so only the document with the most placeholders is checked
    tokens = {at: processor.count_placeholders(documents.tokens(at)) for at in np.flatnonzero(counts_D).tolist()}
    heaviest = max(tokens, key=lambda document: tokens[document])
    tensors = processor.read(documents, heaviest, documents.tokens(heaviest)).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    require(heaviest, size, support.max_bytes, "bytes in the tensors of the images")
