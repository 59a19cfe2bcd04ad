"""Turns the images of documents into placeholder tokens and pixel tensors, with the model's own processor.

When the data is loaded, the processor replaces each image's placeholder in the text by the tokens of the image's
features. The pixel tensors are made again when a micro-batch is built, by one call for each document, so that they do
not depend on the other documents. At the first use, small pictures prove that the concatenated tensors of one call
for each document equal the tensors of a single call for all documents.

S tokens of a document, or of the longest prompt among B prompts.
"""

import io
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data.documents import Documents
from stillhouse.data.media import Expanded, MediaTensors
from stillhouse.data.media_files import MediaFile, MediaFiles
from stillhouse.data.record import DataError, ProcessorError, RecordError
from stillhouse.data.render.tokenizers import tokenizer_fingerprint
from stillhouse.hashing import file_hash, json_hash
from stillhouse.images.decode import IsolatedDecoder, open_image, require_pillow
from stillhouse.images.load_processor import load_processor
from stillhouse.libraries import reading
from stillhouse.models import Decoder
from stillhouse.models.families import placeholder_ids
from stillhouse.models.vision_language import TOKEN_TYPES, model_media, read_token_inputs

_PER_TOKEN = {"input_ids", "attention_mask", "offset_mapping", "text_replacement_offsets", *TOKEN_TYPES}
_PROBES = ((37, 23), (64, 48), (20, 50))  # widths and heights
_PART = 2**22  # the number of tokens that are searched at a time


class _Layout(NamedTuple):
    """The form in which a processor returns the tensors of images. stacked: the names of the tensors whose first dim
    is the documents and whose second dim is the images.
    """

    token_types: str | None  # the name of the token types, if the model has them
    stacked: frozenset[str]


class ImageProcessor:
    """The processor of a model. `MediaProcessor` documents its methods.

    kind: the name of this add-on in the registry. tokenizer: the run's tokenizer, which must also be the
    processor's. most_pixels: a larger image is scaled down to this number of pixels; there is no limit if it is None.
    template_is_set: whether the tokenizer's chat template was replaced by another template.
    """

    kind = "images"

    def __init__(
        self,
        name_or_path: str,
        files: Sequence[Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        most_pixels: int | None = None,
        template_is_set: bool = False,
    ):
        self.name, self.tokenizer, self.most_pixels = name_or_path, tokenizer, most_pixels
        self.files: Sequence[Path] = files
        self._options = revision, trust_remote_code
        self._template_is_set = template_is_set

    def identity(self) -> list[Any]:
        return [self.most_pixels, *map(file_hash, self.files)]

    def versions(self) -> list[Any]:
        """The version of Pillow, and hashes of the files of this package."""
        try:
            pillow = version("pillow")
        except PackageNotFoundError:
            pillow = None
        return [pillow, *map(file_hash, sorted(Path(__file__).parent.glob("*.py")))]

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers. Raises ValueError if it cannot be loaded, has another tokenizer or another
        chat template, or has no placeholder token for images.
        """
        require_pillow()
        processor = load_processor(self.name, *self._options)
        what = f"the processor of {self.name!r}"
        if tokenizer_fingerprint(processor.tokenizer) != tokenizer_fingerprint(self.tokenizer):
            raise ValueError(
                f"{what} has another tokenizer than the model ({type(processor.tokenizer).__name__} with "
                f"{len(processor.tokenizer):,} tokens, expected {len(self.tokenizer):,}): save it again, with "
                "AutoProcessor.from_pretrained(…).save_pretrained(folder)"
            )
        template = self.tokenizer.chat_template
        if not self._template_is_set and processor.chat_template not in (None, template):
            raise ValueError(
                f"{what} and its tokenizer have different chat templates: set data.chat_template to a file with the "
                "template to use"
            )
        if getattr(processor, "image_token", None) is None:
            raise ValueError(f"{what} ({type(processor).__name__}) has no placeholder token for images")
        return processor

    @cached_property
    def pixels_identity(self) -> str:
        return json_hash([self.most_pixels, self.processor.image_processor.to_dict()])

    @property
    def placeholder(self) -> str:
        return str(self.processor.image_token)

    @cached_property
    def placeholder_ids(self) -> list[int]:
        ids = {*self.processor.image_token_ids, self.tokenizer.convert_tokens_to_ids(self.placeholder)}
        return sorted(index for index in ids if index is not None)

    @cached_property
    def layout(self) -> _Layout:
        """The form of the tensors, from calls with small pictures. Raises ValueError if one call for several
        documents does not return the concatenated tensors of a call for each document.
        """
        with reading(f"the processor of {self.name!r} ({type(self.processor).__name__}) does not process pictures"):
            pictures = _random_pictures()
            one, two, together = pictures[:1], pictures[1:], pictures
            separate = [self._tensors([one]), self._tensors([two])]
            stacked = frozenset(
                name
                for name in separate[0]
                if {len(tensors[name]) for tensors in separate} == {1}
                and separate[0][name].dim() > 1
                and [tensors[name].shape[1] for tensors in separate] != [separate[0][name].shape[1]] * 2
            )
            made, together_tensors = self._tensors([one, two]), self._tensors([together])
            kinds = self._call([one], [self.placeholder])
        for name, tensor in concatenated(separate, stacked).items():
            expected = together_tensors[name] if name in stacked else made[name]
            if tensor.shape != expected.shape or not torch.equal(tensor, expected):
                raise ValueError(
                    f"the processor of {self.name!r} ({type(self.processor).__name__}) makes another {name!r} from "
                    "two documents in one call than in two calls: its model cannot be trained on images"
                )
        # the name of the token types with other values than 0 for the placeholders of an image
        types = next((name for name in TOKEN_TYPES if name in kinds and kinds[name].any()), None)
        return _Layout(types, stacked)

    def prepare(self) -> None:
        try:
            self.layout  # noqa: B018 - a cached property
        except ValueError as error:
            raise ProcessorError(str(error)) from error

    def expand(self, text: str, images: Sequence[MediaFile], *, special: bool, is_safe: bool = False) -> Expanded:
        """See `MediaProcessor`. Raises RecordError for an image that cannot be decoded or that the processor refuses,
        and for a text that does not have one placeholder for each image.
        """
        token = self.placeholder
        if (count := text.count(token)) != len(images):
            raise RecordError(
                f"the text that the chat template renders has {count} times the placeholder {token!r} for "
                f"{len(images)} images: expected one per image, and none in the texts of the record"
            )
        pictures = [self._opened(image, number, is_safe=is_safe) for number, image in enumerate(images, start=1)]
        try:
            with reading("the processor refuses the images"):
                options = dict.fromkeys(("return_offsets_mapping", "return_text_replacement_offsets"), True)
                out = self.processor(text=[text], images=[pictures], add_special_tokens=special, **options)
                ids, offsets = list(out["input_ids"][0]), [tuple(span) for span in out["offset_mapping"][0]]
                items = out["text_replacement_offsets"][0]
                replaced = [(tuple(item["span"]), tuple(item["new_span"])) for item in items]
        except ValueError as error:
            raise RecordError(str(error)) from error
        return Expanded(ids, offsets, replaced)

    def read(self, documents: Documents, document: int, ids: np.ndarray) -> MediaTensors:
        """See `MediaProcessor`. Raises DataError if a file has changed since the data was loaded, or if the number of
        placeholder tokens is now different.
        """
        try:
            return self.read_files(documents.media_of(document), ids)
        except ValueError as error:
            raise DataError(documents.sources[document], str(error)) from error

    def read_files(self, images: Sequence[MediaFile], ids: np.ndarray) -> MediaTensors:
        if not images:
            return MediaTensors({}, [])
        pictures = [self._opened(image, number) for number, image in enumerate(images, start=1)]
        out = self._call([pictures], [self.placeholder * len(pictures)])
        placeholders = self.count_placeholders(np.asarray(out["input_ids"][0]))
        expected = self.count_placeholders(ids)
        if placeholders != expected:
            raise ValueError(
                f"its images have {expected} placeholder tokens in the loaded data, and the processor makes "
                f"{placeholders} now: remove the entry of data.cache that has this data, and start again"
            )
        tensors = {name: out[name] for name in out if name not in _PER_TOKEN}
        return MediaTensors(tensors, [picture.size for picture in pictures])

    def example_documents(self) -> list[dict[str, Tensor]]:
        one, *two = _random_pictures()
        token = self.placeholder
        with reading(f"the processor of {self.name!r} does not process pictures"):
            made = [
                self._call([[one]], [f"two and {token} two is four"]),
                self._call([two], [f"what {token} is {token} next"]),
                self._call(None, ["numbers such as 1024"]),
            ]
        kept = {*TOKEN_TYPES, "input_ids"}
        return [{name: out[name] for name in out if name in kept or name not in _PER_TOKEN} for out in made]

    def example_prompts(self) -> list[tuple[np.ndarray, list[MediaFile]]]:
        files, token = list[MediaFile](), self.placeholder
        for picture in _random_pictures():
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            files.append(MediaFile.of(buffer.getvalue()))
        one, *two = files
        texts = {f"{token} and {token} are": two, f"what is {token} ?": [one], "numbers such as": []}
        prompts: list[tuple[np.ndarray, list[MediaFile]]] = []
        for text, images in texts.items():
            expanded = self.expand(text, images, special=True, is_safe=True) if images else None
            ids = self.tokenizer(text)["input_ids"] if expanded is None else expanded.ids
            prompts.append((np.asarray(ids, dtype=np.int32), images))
        return prompts

    def join(self, documents: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        with_images = [tensors for tensors in documents if tensors]
        return concatenated(with_images, self.layout.stacked) if with_images else {}

    def count_placeholders(self, ids: np.ndarray) -> int:
        """The number of tokens whose embeddings the features of images replace."""
        return int(np.isin(ids, self.placeholder_ids).sum())

    def token_types(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        if (name := self.layout.token_types) is None:
            return {}
        return {name: np.asarray(self.processor.create_mm_token_type_ids([ids.tolist()])[0], dtype=np.int64)}

    def prompt_arguments(self, decoder: Decoder, requests: Sequence[Any], width: int) -> dict[str, Tensor]:
        """The arguments of transformers' `generate` with the images and the token types [B, S] of a batch of
        `GenerationRequest`s. width: S.

        `generate` runs the vision tower once, for the tokens of the prompts, and computes rotary positions itself.
        Prompts are padded on the left. Images are in the order of the rows.
        Raises ValueError with the request's number if an image cannot be read, if its file has changed since the data
        was loaded, and if a prompt ends with an image.
        """
        model = decoder.pretrained
        placeholders = {*self.placeholder_ids, *placeholder_ids(model)}
        for request in requests:
            # `generate` would continue each axis from its own last position, and these differ at the end of an image
            if request.prompt_ids[-1] in placeholders:
                raise ValueError(
                    f"request {request.number}: its prompt ends with an image: expected text behind it, such as the "
                    "beginning of the assistant's turn"
                )
        arguments = model_media(model, decoder.backbone, self.join(self.prompt_tensors(requests)))
        types_BS: dict[str, np.ndarray] = {}
        for row, request in enumerate(requests):
            for name, types_S in self.token_types(request.prompt_ids).items():
                zeros_BS = np.zeros((len(requests), width), dtype=np.int64)
                types_BS.setdefault(name, zeros_BS)[row, -len(types_S) :] = types_S
        kinds = {name: torch.from_numpy(value) for name, value in types_BS.items()}
        return arguments | read_token_inputs(model, kinds)

    def prompt_tensors(self, requests: Sequence[Any]) -> list[Mapping[str, Tensor]]:
        """The tensors of each request's images. If several requests have the same images, they are processed once."""
        made: dict[tuple[bytes, ...], Mapping[str, Tensor]] = {}
        tensors: list[Mapping[str, Tensor]] = []
        for request in requests:
            key = tuple(image.sha256 for image in request.media)
            if key not in made and not request.media_tensors:
                try:
                    made[key] = self.read_files(request.media, request.prompt_ids).tensors
                except ValueError as error:
                    raise ValueError(f"request {request.number}: {error}") from error
            tensors.append(request.media_tensors or made[key])
        return tensors

    def in_words(self, documents: Documents, document: int) -> str:
        assert documents.media is not None
        images = enumerate(documents.media.of(document), start=1)
        sizes = (self._opened(image, number).size for number, image in images)
        shown = ", ".join(f"{width:,} × {height:,}" for width, height in sizes) or "none"
        tokens, targets = documents.tokens(document), int(documents.target_counts_D[document])
        return (
            f"{documents.sources[document]}: images of {shown} pixels, {self.count_placeholders(tokens):,} "
            f"placeholder tokens of {len(tokens):,}, {targets:,} to predict"
        )

    def shortened(self, text: str) -> str:
        tokens = map(re.escape, self.tokenizer.convert_ids_to_tokens(self.placeholder_ids))
        return re.sub(
            rf"({'|'.join(tokens)})\1{{3,}}", lambda match: f"{match[1]}[× {len(match[0]) // len(match[1]):,}]", text
        )

    def check_texts(self, documents: Documents) -> None:
        counts_D = np.diff((documents.media or MediaFiles.none(len(documents))).offsets)
        for start in range(0, len(documents.tokens_N), _PART):
            places = start + np.flatnonzero(np.isin(documents.tokens_N[start : start + _PART], self.placeholder_ids))
            owners = np.searchsorted(documents.offsets, places, side="right") - 1
            if len(without := owners[counts_D[owners] == 0]):
                raise DataError(
                    documents.sources[int(without[0])],
                    "its text has a placeholder token of images, but there is no image",
                )

    @cached_property
    def _isolated_decoder(self) -> IsolatedDecoder:
        return IsolatedDecoder(self.most_pixels)

    def _opened(self, image: MediaFile, number: int, *, is_safe: bool = True) -> Any:
        try:
            data = image.read()
            return open_image(data, self.most_pixels) if is_safe else self._isolated_decoder.open(data)
        except RecordError as error:
            place = "" if image.path is None else f" ({image.path})"
            raise RecordError(f"image {number}{place} {error}") from error

    def _call(self, pictures: list[list[Any]] | None, texts: list[str]) -> Mapping[str, Any]:
        return self.processor(text=texts, images=pictures, padding=len(texts) > 1, return_tensors="pt")

    def _tensors(self, pictures: list[list[Any]]) -> dict[str, Tensor]:
        out = self._call(pictures, [self.placeholder * len(document_pictures) for document_pictures in pictures])
        return {name: out[name] for name in out if name not in _PER_TOKEN}


def _random_pictures() -> list[Any]:
    random = np.random.default_rng(0)
    fromarray = require_pillow().fromarray
    return [fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in _PROBES]


def concatenated(parts: Sequence[Mapping[str, Tensor]], stacked: frozenset[str]) -> dict[str, Tensor]:
    """Concatenate the tensors of several documents' images along the dim of the images, so that the result equals the
    tensors of one call. Other dims are padded with zeros at the end. stacked: see `_Layout`.
    """
    joined: dict[str, Tensor] = {}
    for name in parts[0]:
        tensors, padded = [part[name][0] if name in stacked else part[name] for part in parts], []
        sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
        for tensor in tensors:
            whole = tensor.new_zeros(len(tensor), *sizes)
            whole[(slice(None), *map(slice, tensor.shape[1:]))] = tensor
            padded.append(whole)
        joined[name] = torch.cat(padded)[None] if name in stacked else torch.cat(padded)
    return joined
