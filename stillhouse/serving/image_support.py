"""The images that a server accepts: how `GET /v1/info` describes them, and how a client checks its documents."""

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
    """The description of the images that a server accepts.

    processor: the `processor_hash` of the server's processor. positions: the `positions_hash` of the server's model.
    max_images: the maximum number of images of a request. max_bytes: the maximum number of bytes of the image tensors
    of a request. max_pixels: the maximum number of pixels of all images of a sequence, or None if an older server
    does not report it.
    """

    model_config = ConfigDict(extra="ignore")

    processor: str
    positions: str
    max_images: int
    max_bytes: int
    max_pixels: int | None = None


def processor_hash(processor: MediaProcessor) -> str:
    """Return a hash of a processor's settings and of its output for example pictures: the tokens, the integer
    tensors, and the shapes and dtypes of the other tensors. The hash does not include the values of pixels, because
    their last bits depend on the machine.
    """
    documents = [
        {
            name: tensor.tolist() if not tensor.is_floating_point() else [list(tensor.shape), str(tensor.dtype)]
            for name, tensor in document.items()
        }
        for document in processor.example_documents()
    ]
    assert isinstance(processor, ImageProcessor), "servers read no media other than images"
    return json_hash([processor.processor.image_processor.to_dict(), processor.placeholder_ids, documents])


def positions_hash(positions: Sequence[Tensor | None]) -> str:
    """Return one hash of the rotary positions (tokens × axes) that a model gives to all `example_documents`."""
    return json_hash([None if positions_SA is None else positions_SA.tolist() for positions_SA in positions])


def require_accepted(
    url: str, support: ImageSupport | None, documents: Documents, processor: MediaProcessor, what: str
) -> None:
    """Raise ValueError unless the server accepts images and has this processor. Raise DataError for the first
    document whose images exceed a limit of the server.

    support: the server's description of the images that it accepts, or None if it accepts none.
    documents: documents, at least one of which has images. what: the name of the documents in errors.
    """
    if support is None:
        raise ValueError(f"{what} has images, and {url} accepts no images: start it with stillhouse serve --images")
    if support.processor != processor_hash(processor):
        raise ValueError(
            f"{what} has images, and the model of {url} has another processor of images than student.model: expected "
            "a model with the student's processor, and the same versions of transformers and torch on both machines"
        )
    assert isinstance(processor, ImageProcessor), "servers read no media other than images"
    assert documents.media is not None

    def require(document: int, size: int, limit: int, unit: str) -> None:
        if size > limit:
            raise DataError(
                documents.sources[document],
                f"{size:,} {unit} of {what}, but {url} accepts at most {limit:,} in a request: expected fewer "
                "images, or smaller ones (data.image_pixels scales images down)",
            )

    counts_D = np.diff(documents.media.offsets)
    for document in np.flatnonzero(counts_D > support.max_images).tolist():
        require(document, int(counts_D[document]), support.max_images, "images")
    if support.max_pixels is not None:
        largest_pixels = MAX_PIXELS if processor.most_pixels is None else processor.most_pixels
        # pixels are counted only if the number of images allows too many, because counting opens the image files
        for document in np.flatnonzero(counts_D * largest_pixels > support.max_pixels).tolist():
            pixels = sum(pixel_count(image, processor.most_pixels) for image in documents.media.of(document))
            require(document, pixels, support.max_pixels, "pixels in the images")
    # the size of tensors is known only after processing, which is slow, so only the document with the most
    # placeholder tokens is checked
    tokens = {at: processor.count_placeholders(documents.tokens(at)) for at in np.flatnonzero(counts_D).tolist()}
    heaviest = max(tokens, key=lambda document: tokens[document])
    tensors = processor.read(documents, heaviest, documents.tokens(heaviest)).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    require(heaviest, size, support.max_bytes, "bytes in the tensors of the images")
