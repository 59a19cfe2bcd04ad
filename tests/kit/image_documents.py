"""Documents with unlike images, as the processors of `image_models` make them, and micro-batches of them.

B rows, S columns per row, A axes of positions.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kit.image_models import image_model, image_tokenizer, picture, write_image_model, write_processor
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from stillhouse.data import Documents, LoadOptions, load_documents, load_tokenizer
from stillhouse.images import IMAGES
from stillhouse.images.load_processor import load_processor
from stillhouse.images.processor import ImageProcessor
from stillhouse.models import Decoder
from stillhouse.models.processors import Targets

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
        processor = IMAGES.find_processor(str(folder), self.tokenizer, **options)
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


Document = dict[str, Tensor]
#: the widths and heights of each document's images
DOCUMENT_SIZES = (((12, 8),), ((20, 12), (8, 8)), (), ((8, 24),))
_OF_TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_STACKED = {"pixel_values": 5, "pixel_attention_mask": 4}  # of processors that return a dim of documents


def model_of(family: str, **options: Any) -> PreTrainedModel:
    return image_model(family, image_tokenizer(family), **options)


def documents_of(family: str, folder: Path, sizes: Sequence[Sequence[Any]] = DOCUMENT_SIZES) -> list[Document]:
    """Documents as the family's processor returns them, [1, S] for tokens. folder: to write the model in."""
    processor: Any = load_processor(str(write_image_model(family, folder)))
    documents = []
    for number, of_document in enumerate(sizes):
        images = [{"type": "image"} for _ in of_document]
        question = [{"type": "text", "text": "what" * (number + 1)}, *images, {"type": "text", "text": "is this?"}]
        answer = [{"type": "text", "text": "a small picture"[number:]}]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        text = processor.tokenizer.apply_chat_template(turns, tokenize=False)
        pictures = [picture(10 * number + place, *size) for place, size in enumerate(of_document)]
        documents.append(dict(processor(text=[text], images=[pictures] if pictures else None, return_tensors="pt")))
    return documents


def images_of(document: Mapping[str, Tensor]) -> Document:
    return {name: value for name, value in document.items() if name not in _OF_TOKENS}


def joined_images(parts: Sequence[Mapping[str, Tensor]]) -> Document:
    """The images of several documents as a micro-batch has them."""
    masked = [part for part in parts if "pixel_attention_mask" in part]
    stacked = {name for part in masked for name in _STACKED if name in part}
    joined = {}
    for name in parts[0] if parts else ():
        values = [part[name][0] if name in stacked else part[name] for part in parts]
        sizes = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
        padded = [
            pad(
                value,
                [end for size, dim in zip(sizes[::-1], value.shape[:0:-1], strict=True) for end in (0, size - dim)],
            )
            for value in values
        ]
        joined[name] = torch.cat(padded)[None] if name in stacked else torch.cat(padded)
    return joined


@dataclass(frozen=True)
class Packed:
    """arguments: of a decoder's forward. labels_BS: the next token of each text token, else -1."""

    arguments: dict[str, Any]
    labels_BS: Tensor

    @property
    def targets(self) -> Targets:
        return Targets(self.labels_BS)

    def changed(self, **arguments: Any) -> dict[str, Any]:
        return {**self.arguments, **arguments}


def labels_of(model: PreTrainedModel, document: Document) -> Tensor:
    """The next token of each token, [S]; -1 where it is a placeholder, and for the last token."""
    ids_S = document["input_ids"][0]
    labels_S = torch.cat([ids_S[1:], ids_S.new_tensor([-1])])
    return labels_S.masked_fill(labels_S == model.config.image_token_id, -1)


def packed(decoder: Decoder, rows: Sequence[Sequence[Document]], padding: int = 3) -> Packed:
    """Documents in rows. padding: columns behind the longest row."""
    columns = padding + max(sum(document["input_ids"].shape[1] for document in row) for row in rows)
    parts: list[dict[str, Tensor]] = []
    for row in rows:
        tensors = [_tensors(decoder, document) for document in row]
        count = columns - sum(len(part["labels"]) for part in tensors)
        parts.append(
            {
                name: torch.cat([*(part[name] for part in tensors), _padding(tensors[0], name, count)])
                for name in tensors[0]
            }
        )
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    labels_BS, is_padding_BS = stacked.pop("labels"), stacked.pop("is_padding")
    images = joined_images([of for row in rows for document in row if (of := images_of(document))])
    return Packed({**stacked, "is_padding": is_padding_BS, "images": images}, labels_BS)


def _tensors(decoder: Decoder, document: Document) -> dict[str, Tensor]:
    ids_S = document["input_ids"][0]
    types = {name: document[name][0] for name in _OF_TOKENS[2:] if name in document}
    axes_SA = decoder.axis_positions(ids_S, next(iter(types.values()), None), images_of(document))
    return {
        "input_ids": ids_S,
        "position_ids": torch.arange(len(ids_S)),
        **types,
        **({} if axes_SA is None else {"axis_position_ids": axes_SA}),
        "labels": labels_of(decoder.pretrained, document),
        "is_padding": torch.zeros(len(ids_S), dtype=torch.bool),
    }


def _padding(tensors: Mapping[str, Tensor], name: str, count: int) -> Tensor:
    value = tensors[name]
    if "position_ids" in name:
        return torch.arange(count).view(-1, *[1] * (value.dim() - 1)).expand(count, *value.shape[1:])
    fill = {"input_ids": value[0], "labels": -1, "is_padding": True}.get(name, 0)
    return torch.full((count,), int(fill), dtype=value.dtype)
