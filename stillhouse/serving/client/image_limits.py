"""Proves before the first step that a server accepts the images of documents, as far as it tells its limits.

D documents.
"""

import numpy as np

from stillhouse.data import DataError, Documents
from stillhouse.data.media import MediaProcessor
from stillhouse.images.decode import MAX_PIXELS, pixel_count
from stillhouse.images.processor import ImageProcessor
from stillhouse.serving.image_wire import ImageSupport, require_processor


def require_accepted(
    url: str, support: ImageSupport | None, documents: Documents, processor: MediaProcessor, what: str
) -> None:
    """Raise ValueError unless the server accepts images and has this processor, and DataError for the first document
    with more images or pixels than it accepts in a request.

    documents: some have images. what: their name in errors.

    The bytes of tensors are known only when the processor has made them. So only the document with the most
    placeholder tokens is compared with that limit.
    """
    require_processor(url, support, processor, what)
    assert support is not None
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
        of_largest = MAX_PIXELS if processor.most_pixels is None else processor.most_pixels
        # files are opened only where the number of images does not decide
        for document in np.flatnonzero(counts_D * of_largest > support.max_pixels).tolist():
            pixels = sum(pixel_count(image, processor.most_pixels) for image in documents.media.of(document))
            require(document, pixels, support.max_pixels, "pixels in the images")
    tokens = {at: processor.count_placeholders(documents.tokens(at)) for at in np.flatnonzero(counts_D).tolist()}
    heaviest = max(tokens, key=lambda document: tokens[document])
    tensors = processor.read(documents, heaviest, documents.tokens(heaviest)).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    require(heaviest, size, support.max_bytes, "bytes in the tensors of the images")
