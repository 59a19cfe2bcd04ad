"""What the report shows of documents with images: small copies, and texts without repeated placeholders."""

import base64
import io
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.media_files import EncodedImage
from stillhouse.images.decode import open_image, require_pillow
from stillhouse.images.processor import ImageProcessor
from stillhouse.output.records import HeldOutImage

#: the most images of a document that the report shows, because each one adds up to 30 kB to the page
IMAGES = 8
#: the longest side of a thumbnail, in pixels
SIDE = 160


class Thumbnail(NamedTuple):
    """width, height: of the image itself, in pixels. url: a data URL of a JPEG of at most `SIDE` pixels a side."""

    width: int
    height: int
    url: str


def thumbnail(image: EncodedImage) -> Thumbnail:
    """Encode the decoded picture anew, so that nothing else of its file gets into a page.

    Raises ValueError if the image cannot be read, or has other bytes than when the data was loaded.
    """
    picture = open_image(image.read())
    width, height = picture.size
    picture.thumbnail((SIDE, SIDE))
    # of an image that it has read, Pillow would write its comment again
    picture = require_pillow().fromarray(np.asarray(picture))
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=85)
    return Thumbnail(width, height, f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}")


def shown_images(documents: Documents, document: int) -> list[HeldOutImage]:
    """Return the document's first images. Raises ValueError for a file that has changed since the data was loaded."""
    return [HeldOutImage(*thumbnail(image)) for image in documents.images_of(document)[:IMAGES]]


def shown_positions(ids: np.ndarray, processor: ImageProcessor | None) -> np.ndarray:
    """Return the positions of all tokens, but only of the first one of each run of placeholders."""
    if processor is None:
        return np.arange(len(ids))
    is_placeholder = np.isin(ids, processor.placeholder_ids)
    return np.flatnonzero(~is_placeholder | ~np.concatenate([[False], is_placeholder[:-1]]))


def shown_text(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray, processor: ImageProcessor | None) -> str:
    """Decode token ids, with one placeholder for each run of them."""
    text: str = tokenizer.decode(ids[shown_positions(ids, processor)].tolist())
    return text


def images_end(ids: np.ndarray, processor: ImageProcessor | None) -> int:
    """Return the least length of a prompt that has all images of its document and a token behind them; 0 without
    images.
    """
    places = np.flatnonzero(np.isin(ids, [] if processor is None else processor.placeholder_ids))
    return int(places[-1]) + 2 if len(places) else 0
