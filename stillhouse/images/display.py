"""What the report shows of images: small copies."""

import base64
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stillhouse.data.media_files import MediaFile
from stillhouse.images.decode import open_image, require_pillow
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


def thumbnail(image: MediaFile) -> Thumbnail:
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


def shown_images(images: Sequence[MediaFile]) -> list[HeldOutImage]:
    """Return a document's first images. Raises ValueError for a file that has changed since the data was loaded."""
    return [HeldOutImage(*thumbnail(image)) for image in images[:IMAGES]]
