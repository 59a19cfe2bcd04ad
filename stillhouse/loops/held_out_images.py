"""What the report shows of documents with images: small copies, and texts without repeated placeholders."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.render.image_processor import ImageProcessor
from stillhouse.data.thumbnails import thumbnail
from stillhouse.output.records import HeldOutImage

#: the most images of a document that the report shows, because each one adds up to 30 kB to the page
IMAGES = 8


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
