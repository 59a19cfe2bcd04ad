"""The bodies of requests and answers: JSON, or a safetensors file with JSON under a key of its header.

`POST /v1/score` uses the key `score`. A row is a token whose signal is requested. D documents have N rows in total:

    request     token_ids [·] int32     the tokens of all documents, one after the other
                offsets [D+1] int64     the tokens of document d are offsets[d]:offsets[d+1]
                rows [D, 2] int32       the requested rows of each document, as a range [start, stop)
                ids [N, K] int32        "chosen": the ids whose log-probabilities are requested
                image.d.NAME            the images of document d, as the tensor for the model's argument NAME
    answer      offsets [D+1] int64     the rows of document d are offsets[d]:offsets[d+1] of the following tensors
                hidden, ids, …          the tensors of the signal (`SignalSpec.tensors`)

The JSON under the key has the fields of `ScoreOptions`. In a request, it may also have the field `images`: a list
with `SentImages` for each document with images, and null for each other document. In an answer, it also has the
teacher's identity (`teacher`). A request without images may be plain JSON instead (`ScoreBody`).

The client's processor makes the tensors of images. So a served model gets the same pixels as the models in the run,
and a server decodes no image files. If the prompt of `POST /inference/v1/generate` has images, the body is a
safetensors file with the tensors of these images. The header of this file has, under the key `generate`, the JSON of
a request without images, plus the field `images`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from stillhouse.data.media import DocumentMedia, MediaTensors
from stillhouse.libraries import first_problem, reading
from stillhouse.serving import JSON
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec

T = TypeVar("T")
KEY, _PROMPT_KEY = "score", "generate"
#: the version of the formats of these bodies and of published weights. It must be incremented for a change that an
#: earlier client or server would misread, or would refuse with an unclear error
WIRE_FORMAT = 1
#: the file with the teacher's output head, which `GET /v1/head` returns
HEAD_FILE = "model.safetensors"
#: the key of the list of images in the header, and the prefix of the names of image tensors
IMAGES, _PREFIX = "images", "image."
#: the maximum number of bytes of a body's header; it is small, because parsing the header is slow
_HEADER_BYTES = 4 * 2**20
#: the maximum number of lists in a JSON body; a valid request has far fewer, even with a list of ids for each token
_MOST_LISTS = 2**18


class _FailFast(FailFast):
    __hash__ = object.__hash__  # unions hash their members, and FailFast has no hash


#: a list whose validation stops at the first invalid value, because millions of values may be invalid
FirstWrong = Annotated[list[T], _FailFast()]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_Side = Annotated[int, Field(ge=1, lt=2**31)]
#: the images of a body: the JSON value of `images`, and the tensors
ReceivedImages = tuple[Any, dict[str, Tensor]]


class StrictBody(BaseModel):
    """A JSON object that is refused if a field is unknown or has the wrong type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SentImages(StrictBody):
    """The entry of one document in the field `images`.

    sizes: the width and the height of each picture before the client's processor has changed it. sha256: the
    `images_hash` of the document.
    """

    sizes: FirstWrong[tuple[_Side, _Side]] = Field(min_length=1, max_length=4096)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


_LIST: TypeAdapter[list[SentImages | None]] = TypeAdapter(FirstWrong[SentImages | None])


class ScoreOptions(StrictBody):
    """The requested signal."""

    signal: SignalKind = "hidden"
    dtype: str = "float32"
    top_k: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, gt=0)

    def spec(self) -> SignalSpec:
        """Return the requested signal. Raises ValueError for options that do not fit together."""
        is_default = self.temperature is None and self.signal != "hidden"
        return SignalSpec(self.signal, self.dtype, self.top_k, 1.0 if is_default else self.temperature)


class ScoreBody(ScoreOptions):
    """A request for signals in JSON.

    token_ids: the ids of each document. rows: for each document, the requested rows as a range [start, stop); null
    requests all rows. ids: for the signal "chosen", the ids whose log-probabilities are requested, as
    [document][row][id].
    """

    token_ids: FirstWrong[FirstWrong[int]] = Field(min_length=1)
    rows: FirstWrong[tuple[int, int]] | None = None
    ids: FirstWrong[FirstWrong[FirstWrong[int]]] | None = None


def require_few_lists(content: bytes) -> None:
    """Raise ValueError for a JSON body with too many lists, because creating and freeing millions takes seconds."""
    if (lists := content.count(b"[")) > _MOST_LISTS:
        raise ValueError(f"{lists} characters '[': expected at most {_MOST_LISTS} in a JSON body")


def header_of(content: bytes, key: str) -> Any:
    """Return the JSON value of `key` in the header of a safetensors body."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"][key])


def decode_body(content: bytes, key: str, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON object `key` of a body's header, and the body's tensors. what: the body's name in messages."""
    with reading(f"{what} is not a safetensors body"):
        if (size := int.from_bytes(content[:8], "little")) > _HEADER_BYTES:
            raise ValueError(f"its header has {size:,} bytes: expected at most {_HEADER_BYTES:,}")
        tensors, options = load(content), header_of(content, key)
    if not isinstance(options, dict):
        raise ValueError(f"{what} is not a safetensors body: '{key}' in its header is not a JSON object")
    return options, tensors


def images_hash(tokens: np.ndarray, images: MediaTensors) -> str:
    """Return the SHA-256 of a document's tokens, the sizes of its images, and all bytes of its image tensors."""
    digest = hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
    for name, tensor in sorted(images.tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    digest.update(json.dumps([list(size) for size in images.sizes]).encode())
    return digest.hexdigest()


def encode_images(documents: Sequence[tuple[np.ndarray, MediaTensors | None]]) -> ReceivedImages:
    """Encode the images of documents as the field `images` of a header's JSON, and as tensors.

    documents: the tokens and the images of each document; None for a document without images.
    """
    tensors: dict[str, Tensor] = {}
    sent: list[dict[str, Any] | None] = [None] * len(documents)
    for number, (tokens, images) in enumerate(documents):
        if images is not None:
            sizes = [list(size) for size in images.sizes]
            sent[number] = {"sizes": sizes, "sha256": images_hash(tokens, images)}
            tensors |= {f"{_PREFIX}{number}.{name}": value.contiguous() for name, value in images.tensors.items()}
    return ({IMAGES: sent} if any(sent) else {}), tensors


def take_images(header: dict[str, Any], tensors: dict[str, Tensor]) -> ReceivedImages:
    """Remove the field and the tensors that `encode_images` has added, and return them for `decode_images`."""
    names = [name for name in tensors if name.startswith(_PREFIX)]
    return header.pop(IMAGES, None), {name: tensors.pop(name) for name in names}


def decode_images(
    sent: Any, tensors: Mapping[str, Tensor], documents: Sequence[np.ndarray]
) -> list[DocumentMedia | None]:
    """Return the images of each document, or None for a document without images.

    sent, tensors: the result of `take_images`. documents: the tokens of each document.
    Raises ValueError if the images are invalid, or do not have the hash that was sent with them.
    """
    images: list[DocumentMedia | None] = [None] * len(documents)
    if sent is None and not tensors:
        return images
    if isinstance(sent, list) and len(sent) != len(documents):
        raise ValueError(f"images for {len(sent)} sequences: expected {len(documents)} entries (null: no images)")
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
            raise ValueError(f"the tensor '{name}' belongs to no sequence with images")
        by_document[owner][tensor_name] = tensor
    for number, (tokens, entry) in enumerate(zip(documents, entries, strict=True)):
        if entry is not None:
            made = MediaTensors(by_document[str(number)], list(entry.sizes))
            if images_hash(tokens, made) != entry.sha256:
                raise ValueError(
                    f"the images of sequence {number} do not have the hash that was sent with them: they were "
                    "changed on the way, or belong to another sequence"
                )
            images[number] = DocumentMedia(bytes.fromhex(entry.sha256), lambda made=made: made)  # type: ignore[misc]
    return images


def encode_prompt(body: dict[str, Any], images: MediaTensors) -> bytes:
    """Encode a request for a prompt with images. body: the JSON of the request; its `token_ids` are the prompt."""
    sent, tensors = encode_images([(np.array(body["token_ids"], dtype=np.int32), images)])
    return save(tensors, {_PROMPT_KEY: json.dumps(body | sent)})


def decode_prompt(content: bytes) -> tuple[bytes, ReceivedImages]:
    """Return the request as JSON, and its images for `decode_images`. Raises ValueError for an invalid body."""
    body, tensors = decode_body(content, _PROMPT_KEY, "the request")
    images = take_images(body, tensors)
    if tensors:
        raise ValueError(f"tensors {sorted(tensors)}: expected only the tensors of the prompt's images")
    return json.dumps(body).encode(), images


def document_tensors(
    documents: Sequence[DocumentRows], images: Sequence[MediaTensors | None] | None = None
) -> ReceivedImages:
    """Return the field `images` of a request's JSON (as a dict), and all tensors of the request except `ids`.

    images: the images of each document if they have already been read. If it is None, they are read now.
    """
    if images is None:
        images = [None if document.media is None else document.media.read() for document in documents]
    sent, tensors = encode_images([(document.tokens, read) for document, read in zip(documents, images, strict=True)])
    token_ids = np.concatenate([document.tokens for document in documents]).astype(np.int32)
    rows = [[document.rows.start, document.rows.stop] for document in documents]
    tensors |= {
        "token_ids": torch.from_numpy(token_ids),
        "offsets": _offsets([len(document.tokens) for document in documents]),
        "rows": torch.tensor(rows, dtype=torch.int32),
    }
    return sent, tensors


def encode_request(
    signal: SignalSpec, documents: Sequence[DocumentRows], images: Sequence[MediaTensors | None] | None = None
) -> bytes:
    """Encode a request for signals. images: see `document_tensors`."""
    sent, tensors = document_tensors(documents, images)
    if chosen := [document.ids_NK for document in documents if document.ids_NK is not None]:
        tensors["ids"] = torch.cat(chosen).to(torch.int32)
    return save(tensors, {KEY: json.dumps(_options(signal) | sent)})


def decode_request(content: bytes, content_type: str, most_documents: int) -> tuple[SignalSpec, list[DocumentRows]]:
    """Read a request. Raises ValueError, with a message of one line, if it is invalid or has too many documents."""
    sent: ReceivedImages = None, {}
    try:
        if content_type == JSON:
            require_few_lists(content)
            body = ScoreBody.model_validate_json(content)
            _require_few(len(body.token_ids), most_documents)
            signal, tensors = body.spec(), _json_tensors(body)
        else:
            options, tensors = decode_body(content, KEY, "the request")
            sent = take_images(options, tensors)
            signal = ScoreOptions.model_validate(options).spec()
            expected = {"token_ids": torch.int32, "offsets": torch.int64, "rows": torch.int32}
            expected |= {"ids": torch.int32} if signal.kind == "chosen" else {}
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            if dtypes != expected:
                raise ValueError(f"tensors {dtypes}: expected {expected}")
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
    token_ids, offsets, rows = (tensors[name] for name in ("token_ids", "offsets", "rows"))
    if token_ids.dim() != 1:
        raise ValueError(f"token_ids of shape {list(token_ids.shape)}: expected one dim")
    _require_few(offsets.numel() - 1, most_documents)
    bounds = offsets.tolist() if offsets.dim() == 1 else []
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if not lengths or min(lengths) < 1 or bounds[0] != 0 or bounds[-1] != len(token_ids):
        raise ValueError(
            f"expected at least one token per document, and offsets from 0 to {len(token_ids)}, the number of tokens"
        )
    documents = [tokens.numpy() for tokens in token_ids.split(lengths)]
    if rows.shape != (len(documents), 2):
        raise ValueError(f"rows of shape {list(rows.shape)}: expected [{len(documents)}, 2]")
    ranges = [range(start, stop) for start, stop in rows.tolist()]
    for tokens, span in zip(documents, ranges, strict=True):
        if not 0 <= span.start < span.stop <= len(tokens):
            raise ValueError(
                f"rows {span.start} to {span.stop} of a document of {len(tokens)} tokens: expected at least one row "
                "of the document"
            )
    shape = None if (ids := tensors.get("ids")) is None else list(ids.shape)
    expected_shape = [sum(map(len, ranges)), signal.top_k] if signal.kind == "chosen" else None
    if shape != expected_shape:
        raise ValueError(f"ids of shape {shape} with signal {signal.kind}: expected {expected_shape or 'no ids'}")
    parts = [None] * len(documents) if ids is None else ids.split([*map(len, ranges)])
    requested = zip(documents, ranges, parts, decode_images(*sent, documents), strict=True)
    return signal, [DocumentRows(tokens, span, part, media=media) for tokens, span, part, media in requested]


def _require_few(sequences: int, most: int) -> None:
    if sequences > most:
        raise ValueError(f"{sequences} sequences: expected at most {most} per request")


def encode_answer(teacher: str, signal: SignalSpec, parts: Sequence[dict[str, Tensor]]) -> bytes:
    """Encode an answer. teacher: the teacher's identity. parts: the signal's tensors for each document."""
    names = list(parts[0])
    tensors = {name: torch.cat([part[name] for part in parts]).contiguous() for name in names}
    tensors["offsets"] = _offsets([len(part[names[0]]) for part in parts])
    return save(tensors, {KEY: json.dumps({**_options(signal), "teacher": teacher})})


def decode_answer(
    content: bytes, signal: SignalSpec, width: int, documents: Sequence[DocumentRows]
) -> tuple[str, list[dict[str, Tensor]]]:
    """Return the teacher's identity, and the signal's tensors for each document.

    Raises ValueError if the answer is truncated, belongs to another request, or has tensors of other shapes.
    """
    options, tensors = decode_body(content, KEY, "the answer")
    teacher = options.pop("teacher", None)
    if not isinstance(teacher, str) or options != _options(signal):
        raise ValueError(f"the answer has {options}: expected {_options(signal)} and the teacher's identity")
    offsets = _offsets([len(document.rows) for document in documents])
    if "offsets" not in tensors or not torch.equal(tensors.pop("offsets"), offsets):
        raise ValueError("the offsets of the answer do not fit the rows of the request")
    expected = {name: ([int(offsets[-1]), *row], dtype) for name, (row, dtype) in signal.tensors(width).items()}
    shapes = {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if shapes != expected:
        raise ValueError(f"the answer has {shapes}: expected {expected}")
    bounds = pairwise(offsets.tolist())
    return teacher, [{name: tensor[start:stop] for name, tensor in tensors.items()} for start, stop in bounds]


def _json_tensors(body: ScoreBody) -> dict[str, Tensor]:
    def int32(what: str, values: Iterable[Any]) -> Tensor:
        try:
            return torch.tensor(list(values), dtype=torch.int32)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{what}, each from −2³¹ to 2³¹ − 1 ({error})") from error

    lengths = [len(tokens) for tokens in body.token_ids]
    rows = [(0, length) for length in lengths] if body.rows is None else body.rows
    tensors = {
        "token_ids": int32("token_ids: expected integers", chain.from_iterable(body.token_ids)),
        "offsets": _offsets(lengths),
        "rows": int32("rows: expected integers", rows),
    }
    if body.ids is not None:
        tensors["ids"] = int32(
            "ids: expected the same number of integers in every row", chain.from_iterable(body.ids)
        )
    return tensors


def _options(signal: SignalSpec) -> dict[str, Any]:
    return {"signal": signal.kind, "dtype": signal.dtype, "top_k": signal.top_k, "temperature": signal.temperature}


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
