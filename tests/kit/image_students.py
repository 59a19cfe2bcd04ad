"""Tokenizers and processors of families that read images, without weights, and records with pictures."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from kit.image_models import picture, write_processor
from transformers import PreTrainedTokenizerBase

from stillhouse.data import (
    Documents,
    LoadOptions,
    load_documents,
    load_tokenizer,
)
from stillhouse.images.processor import ImageProcessor

SIZES = [(12, 8), (20, 16), (9, 30)]
FOUR = {"role": "assistant", "content": [{"type": "text", "text": "four"}]}
QUESTION = "two and two?"


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def image(value: Any) -> dict[str, Any]:
    return {"type": "image", "image": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def png(seed: int = 0, size: tuple[int, int] = (12, 8)) -> bytes:
    file = io.BytesIO()
    picture(seed, *size).save(file, "PNG")
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def write_pictures(folder: Path) -> None:
    for number, size in enumerate(SIZES):
        (folder / f"{number}.png").write_bytes(png(number, size))


class Student:
    """The tokenizer and the processor of a family, in a folder without weights."""

    def __init__(self, family: str, folder: Path, **options: Any):
        write_processor(family, folder)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(folder))
        processor = ImageProcessor.find(str(folder), self.tokenizer, **options)
        assert processor is not None
        self.processor: ImageProcessor = processor

    def load(self, source: Path, max_tokens: int = 600, cache: Path | None = None, **options: Any) -> Documents:
        return load_documents(source, self.tokenizer, LoadOptions(max_tokens, **options), cache, self.processor)

    def load_records(self, folder: Path, *records: dict[str, Any], **options: Any) -> Documents:
        path = folder / "train.jsonl"
        path.write_text("\n".join(map(json.dumps, records)))
        return self.load(path, **options)


CONVERSATIONS = [
    [user(image("0.png"), text(QUESTION)), FOUR],
    [
        user(text("see "), image("1.png"), text("and "), image("2.png")),
        FOUR,
        user(image("0.png"), text("2048")),
        {"role": "assistant", "content": [text("and "), text("Paris")]},
    ],
    [user(text(QUESTION)), FOUR],
]
