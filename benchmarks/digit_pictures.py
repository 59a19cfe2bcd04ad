"""Strips of digits, as pictures with their answers.

With one version of Pillow, which has the font, a seed and a number give the same picture on every machine. The hash
of the digits decides whether a picture is held out.
"""

import io
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features, Image, List, Value
from PIL import Image as Pillow
from PIL import ImageDraw, ImageFont

from stillhouse.tasks import RandomNumbers, is_held_out

TASK, QUESTION = "digits", "read the digits"
#: how many digits a picture has
LENGTHS = range(2, 5)
#: pixels of a picture's height, and of its width for each digit
SIDE = 16
SIZES = (12, 16)  # smallest and largest size of the font, in pixels
TURN, SHIFT = 12, 2  # largest angle to both sides, in degrees, and largest shift to each side, in pixels
DARK = 96  # each channel of the dark colour is below this, and each of the light one at most as far from white
NOISE = 24  # largest noise of a channel to both sides
_GROUP = 1000  # rows of one row group of the file


def parquet_file(seed: int, count: int, *, held_out: bool, lengths: range = LENGTHS) -> bytes:
    """The content of a Parquet file with the columns messages, images, task and length, as `datasets` reads it."""
    message = {"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})}
    columns = {"messages": List(message), "images": List(Image()), "task": Value("string"), "length": Value("int64")}
    rows = [record(seed, number, held_out=held_out, lengths=lengths) for number in range(count)]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, Features(columns).arrow_schema), content, row_group_size=_GROUP)
    return content.getvalue()


def record(seed: int, number: int, *, held_out: bool, lengths: range = LENGTHS) -> dict[str, Any]:
    """Picture `number` of a split as a record of training data, with the bytes of a PNG file."""
    digits = answer(seed, number, held_out=held_out, lengths=lengths)
    encoded = io.BytesIO()
    strip(digits, RandomNumbers(f"{TASK} picture", seed, number)).save(encoded, "png")
    question = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    content = [{"type": "text", "text": digits}]
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": content}],
        "images": [{"bytes": encoded.getvalue(), "path": None}],
        "task": TASK,
        "length": len(digits),
    }


def answer(seed: int, number: int, *, held_out: bool, lengths: range = LENGTHS) -> str:
    """The digits of picture `number` of a split. With `number`, their count cycles through `lengths`."""
    length, random = lengths[number % len(lengths)], RandomNumbers(TASK, seed, number)
    while True:
        digits = "".join(str(random.below(10)) for _ in range(length))
        if is_held_out(TASK, digits) == held_out:
            return digits


def strip(digits: str, random: RandomNumbers) -> Pillow.Image:
    """Draw each digit in a random size, place and angle, all in a random light colour on a dark one, with noise. The
    picture has SIDE rows and SIDE columns for each digit.
    """
    mask = Pillow.new("L", (SIDE * len(digits), SIDE))
    for place, digit in enumerate(digits):
        cell = Pillow.new("L", (SIDE, SIDE))
        x, y = (SIDE / 2 + random.below(2 * SHIFT + 1) - SHIFT for _ in range(2))
        font = _font(SIZES[0] + random.below(SIZES[1] - SIZES[0] + 1))
        ImageDraw.Draw(cell).text((x, y), digit, 255, font, anchor="mm")
        angle = random.below(2 * TURN + 1) - TURN
        mask.paste(cell.rotate(angle, Pillow.Resampling.BICUBIC), (place * SIDE, 0))
    dark = [random.below(DARK) for _ in range(3)]
    light = [255 - random.below(DARK) for _ in range(3)]
    share = np.asarray(mask, dtype=np.int64)[..., None]
    colours = (np.array(light) * share + np.array(dark) * (255 - share)) // 255
    noise = np.array([random.below(2 * NOISE + 1) for _ in range(colours.size)]).reshape(colours.shape) - NOISE
    return Pillow.fromarray((colours + noise).clip(0, 255).astype(np.uint8))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ValueError(
            "pictures of digits need Pillow with FreeType, and the one that is installed has no FreeType"
        )
    return font
