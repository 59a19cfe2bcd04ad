"""Images in the bodies of requests: the tensors that the client's processor made, for each document with images.

    image.D.NAME        the tensor NAME of the images of document D, as an argument of the model
    images              a list in the JSON of the header, with `SentImages` for a document with images, otherwise null

So the pixels of a served model are those that the run makes for its own models, and a server decodes no image files.
The body of `POST /inference/v1/generate` for a prompt with images has these tensors for one document, the prompt, and
the JSON of a request without images, with `images`, as `generate` in its header. D documents.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from stillhouse.data import DataError, Documents
from stillhouse.data.media import DocumentMedia, MediaProcessor, MediaTensors
from stillhouse.hashing import json_hash
from stillhouse.images.decode import MAX_PIXELS, pixel_count
from stillhouse.images.processor import ImageProcessor
from stillhouse.libraries import reading
from stillhouse.serving.strict_body import FirstWrong, StrictBody, TokenId, first_problem

#: the key of the list in the header, and the beginning of the tensors' names
IMAGES, _PREFIX = "images", "image."
#: the most bytes of a body's header, whose parts cost much more time than their bytes
_HEADER_BYTES = 4 * 2**20
_Side = Annotated[int, Field(ge=1, lt=2**31)]


class SentImages(StrictBody):
    """sizes: the width and height of each picture that the processor got. sha256: see `images_hash`."""

    sizes: FirstWrong[tuple[_Side, _Side]] = Field(min_length=1, max_length=4096)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ImageSupport(StrictBody):
    """What a server tells of the images that it accepts, in `GET /v1/info`.

    processor, positions: the `processor_hash` of its processor, and the `positions_hash` of its model.
    max_images, max_bytes: the most images of a request, and the most bytes of their tensors.
    max_pixels: the most pixels of the images of a sequence; None: an older server, which does not tell.
    """

    model_config = ConfigDict(extra="ignore")

    processor: str
    positions: str
    max_images: int
    max_bytes: int
    max_pixels: int | None = None


_LIST: TypeAdapter[list[SentImages | None]] = TypeAdapter(FirstWrong[SentImages | None])


def processor_hash(processor: MediaProcessor) -> str:
    """A hash of a processor's settings, and of the tokens, shapes and integers that it makes of pictures. Pixels are
    compared by the settings, because their last bits depend on the machine.
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


def images_hash(tokens: np.ndarray, images: MediaTensors) -> str:
    """A hash of a document's tokens, and of the sizes and all bytes of its images."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
    for name, tensor in sorted(images.tensors.items()):
        shape = [name, str(tensor.dtype), list(tensor.shape)]
        digest.update(json.dumps(shape).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(json.dumps([list(size) for size in images.sizes]).encode())
    return digest.hexdigest()


def encode_images(
    documents: Sequence[tuple[np.ndarray, MediaTensors | None]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a body, and the entries of its header's JSON. documents: tokens, and images or None."""
    if all(images is None for _, images in documents):
        return {}, {}
    tensors: dict[str, Tensor] = {}
    sent: list[dict[str, Any] | None] = []
    for number, (tokens, images) in enumerate(documents):
        if images is None:
            sent.append(None)
            continue
        sent.append({"sizes": [list(size) for size in images.sizes], "sha256": images_hash(tokens, images)})
        tensors |= {f"{_PREFIX}{number}.{name}": value.contiguous() for name, value in images.tensors.items()}
    return tensors, {IMAGES: sent}


def header_of(content: bytes, key: str) -> Any:
    """The JSON value of `key` in the header of a safetensors body."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][key])


def decode_body(content: bytes, key: str, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON object `key` of a body's header, and the body's tensors. what: the body, for messages."""
    with reading(f"{what} is not a safetensors body"):
        if (size := int.from_bytes(content[:8], "little")) > _HEADER_BYTES:
            raise ValueError(f"its header has {size:,} bytes: expected at most {_HEADER_BYTES:,}")
        tensors, options = load(content), header_of(content, key)
    if not isinstance(options, dict):
        raise ValueError(f"{what} is not a safetensors body: '{key}' of its header is no object")
    return options, tensors


def take_images(header: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Remove what `encode_images` has added, and return it for `decode_images`."""
    names = [name for name in tensors if name.startswith(_PREFIX)]
    return header.pop(IMAGES, None), {name: tensors.pop(name) for name in names}


def decode_images(
    sent: Any, tensors: Mapping[str, Tensor], documents: Sequence[np.ndarray]
) -> list[DocumentMedia | None]:
    """The images of each document. documents: their tokens. Raises ValueError for other or changed images."""
    if sent is None and not tensors:
        return [None] * len(documents)
    if isinstance(sent, list) and len(sent) != len(documents):
        raise ValueError(f"images of {len(sent)} sequences: expected an entry for each of {len(documents)}, or null")
    try:
        entries = _LIST.validate_json(json.dumps(sent))
    except ValidationError as error:
        raise ValueError(f"images: {first_problem(error)}") from error
    by_document: dict[str, dict[str, Tensor]] = {
        str(number): {} for number, entry in enumerate(entries) if entry is not None
    }
    for name, tensor in tensors.items():
        owner, _, tensor_name = name.removeprefix(_PREFIX).partition(".")
        if owner not in by_document or not tensor_name:
            raise ValueError(f"a tensor '{name}', which belongs to no sequence with images")
        by_document[owner][tensor_name] = tensor
    images: list[DocumentMedia | None] = []
    for number, (tokens, entry) in enumerate(zip(documents, entries, strict=True)):
        if entry is None:
            images.append(None)
            continue
        made = MediaTensors(by_document[str(number)], list(entry.sizes))
        if images_hash(tokens, made) != entry.sha256:
            raise ValueError(
                f"the images of sequence {number} do not have the hash that was sent with them: they were changed on "
                "the way, or belong to another sequence"
            )
        images.append(DocumentMedia(bytes.fromhex(entry.sha256), lambda made=made: made))  # type: ignore[misc]
    return images


_KEY = "generate"
_IDS: TypeAdapter[list[int]] = TypeAdapter(FirstWrong[TokenId])


def encode_prompt(body: dict[str, Any], images: MediaTensors) -> bytes:
    """body: a request as JSON; its `token_ids` are the prompt"""
    tensors, sent = encode_images([(np.array(body["token_ids"], dtype=np.int32), images)])
    return save(tensors, {_KEY: json.dumps(body | sent)})


def decode_prompt(content: bytes) -> tuple[bytes, DocumentMedia | None]:
    """The request as JSON, and the images of its prompt. Raises ValueError for another body."""
    body, tensors = decode_body(content, _KEY, "the request")
    images = take_images(body, tensors)
    if tensors:
        raise ValueError(f"tensors {sorted(tensors)}: expected those of images alone")
    try:
        ids = _IDS.validate_python(body.get("token_ids"), strict=True)
    except ValidationError as error:
        raise ValueError(f"token_ids: {first_problem(error)}") from error
    [prompt_images] = decode_images(*images, [np.array(ids, dtype=np.int32)])
    return json.dumps(body).encode(), prompt_images


def require_accepted(
    url: str, support: ImageSupport | None, documents: Documents, processor: MediaProcessor, what: str
) -> None:
    """Raise ValueError unless the server accepts images and has this processor, and DataError for the first document
    with more images or pixels than it accepts in a request. documents: some have images. what: their name in errors.
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
        # files are opened only where the number of images does not decide
        for document in np.flatnonzero(counts_D * largest_pixels > support.max_pixels).tolist():
            pixels = sum(pixel_count(image, processor.most_pixels) for image in documents.media.of(document))
            require(document, pixels, support.max_pixels, "pixels in the images")
    # the bytes of tensors are known only when the processor has made them: look at the most placeholder tokens alone
    tokens = {at: processor.count_placeholders(documents.tokens(at)) for at in np.flatnonzero(counts_D).tolist()}
    heaviest = max(tokens, key=lambda document: tokens[document])
    tensors = processor.read(documents, heaviest, documents.tokens(heaviest)).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    require(heaviest, size, support.max_bytes, "bytes in the tensors of the images")
