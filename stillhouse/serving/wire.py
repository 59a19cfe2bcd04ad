"""The bodies of `POST /v1/score` and of its answer: one safetensors file each, for D documents with N rows in total.

    request     token_ids [·] int32     the tokens of all documents, one after the other
                offsets [D+1] int64     the tokens of document d are offsets[d]:offsets[d+1]
                rows [D, 2] int32       the requested rows of each document, as a range [start, stop)
                ids [N, K] int32        "chosen": the ids whose log-probabilities are requested
                image.D.NAME            the tensors of the images of document D (`image_wire.py`)
    answer      offsets [D+1] int64     the rows of document d are offsets[d]:offsets[d+1] of the following tensors
                hidden, ids, …          the tensors of the signal (`SignalSpec.tensors`)

The key `score` of each header has JSON: `ScoreOptions`, in a request also `images`, in an answer also the teacher's
identity (`teacher`). A request without images may be JSON instead (`ScoreBody`).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from safetensors.torch import save
from torch import Tensor

from stillhouse.data.media import MediaTensors
from stillhouse.serving.image_wire import decode_body, decode_images, encode_images, take_images
from stillhouse.serving.strict_body import JSON, SAFETENSORS, FirstWrong, StrictBody, first_problem, require_few_lists
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec

KEY = "score"
#: the number of the format of these bodies, of prompts with images and of published weights. A change that an earlier
#: client or server would misread, or refuse without saying why, raises it
WIRE_FORMAT = 1
#: the file of the teacher's output head, the answer of `GET /v1/head`
HEAD_FILE = "model.safetensors"


class ScoreOptions(StrictBody):
    """The requested signal."""

    signal: SignalKind = "hidden"
    dtype: str = "float32"
    top_k: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, gt=0)

    def spec(self) -> SignalSpec:
        """Raises ValueError for options that do not fit together."""
        temperature = self.temperature
        if temperature is None and self.signal != "hidden":
            temperature = 1.0
        return SignalSpec(self.signal, self.dtype, self.top_k, temperature)


class ScoreBody(ScoreOptions):
    """A request in JSON. rows: a range [start, stop) per document; absent: all rows. ids: [document][row][id]."""

    token_ids: FirstWrong[FirstWrong[int]] = Field(min_length=1)
    rows: FirstWrong[tuple[int, int]] | None = None
    ids: FirstWrong[FirstWrong[FirstWrong[int]]] | None = None


def encode_request(
    signal: SignalSpec, documents: Sequence[DocumentRows], images: Sequence[MediaTensors | None] | None = None
) -> bytes:
    """images: those of each document, read before; None: read them now"""
    if images is None:
        images = read_images(documents)
    tensors = document_tensors(documents)
    image_tensors, sent = encode_images(
        [(document.tokens, read) for document, read in zip(documents, images, strict=True)]
    )
    chosen = [document.ids_NK for document in documents if document.ids_NK is not None]
    if chosen:
        tensors["ids"] = torch.cat(chosen).to(torch.int32)
    return save(tensors | image_tensors, {KEY: json.dumps(_options(signal) | sent)})


def read_images(documents: Sequence[DocumentRows]) -> list[MediaTensors | None]:
    return [None if document.media is None else document.media.read() for document in documents]


def document_tensors(documents: Sequence[DocumentRows]) -> dict[str, Tensor]:
    """The tensors `token_ids`, `offsets` and `rows` of a request."""
    return {
        "token_ids": torch.from_numpy(np.concatenate([document.tokens for document in documents]).astype(np.int32)),
        "offsets": _offsets([len(document.tokens) for document in documents]),
        "rows": torch.tensor(
            [[document.rows.start, document.rows.stop] for document in documents], dtype=torch.int32
        ),
    }


def decode_request(content: bytes, content_type: str, most_documents: int) -> tuple[SignalSpec, list[DocumentRows]]:
    """Raises ValueError with a one-line message unless the request is valid and has at most `most_documents`."""
    if content_type not in (JSON, SAFETENSORS):
        raise ValueError(f"content type '{content_type}': expected {JSON} or {SAFETENSORS}")
    sent: tuple[Any, dict[str, Tensor]] = None, {}
    try:
        if content_type == JSON:
            signal, tensors = _from_json(content, most_documents)
        else:
            signal, tensors, sent = _from_safetensors(content)
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
            f"expected one token or more per document, and offsets from 0 to all {len(token_ids)} tokens"
        )
    documents = [tokens.numpy() for tokens in token_ids.split(lengths)]
    if rows.shape != (len(documents), 2):
        raise ValueError(f"rows of shape {list(rows.shape)}: expected [{len(documents)}, 2]")
    for tokens, (start, stop) in zip(documents, rows.tolist(), strict=True):
        if not 0 <= start < stop <= len(tokens):
            raise ValueError(
                f"rows {start} to {stop} of a document of {len(tokens)} tokens: expected some of its rows"
            )
    ranges = [range(start, stop) for start, stop in rows.tolist()]
    without_images = _with_ids(signal, documents, ranges, tensors.get("ids"))
    images = decode_images(*sent, documents)
    return signal, [replace(document, media=of) for document, of in zip(without_images, images, strict=True)]


def encode_answer(teacher: str, signal: SignalSpec, parts: Sequence[dict[str, Tensor]]) -> bytes:
    """teacher: the teacher's identity. parts: for each document of the request, the signal's tensors."""
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
        raise ValueError(f"the answer has {options}: expected {_options(signal)} and the teacher")
    offsets = _offsets([len(document.rows) for document in documents])
    if "offsets" not in tensors or not torch.equal(tensors.pop("offsets"), offsets):
        raise ValueError("the answer has other rows than the request")
    expected = {name: ([int(offsets[-1]), *row], dtype) for name, (row, dtype) in signal.tensors(width).items()}
    shapes = {name: (list(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    if shapes != expected:
        raise ValueError(f"the answer has {shapes}: expected {expected}")
    bounds = pairwise(offsets.tolist())
    return teacher, [{name: tensor[start:stop] for name, tensor in tensors.items()} for start, stop in bounds]


def _from_safetensors(content: bytes) -> tuple[SignalSpec, dict[str, Tensor], tuple[Any, dict[str, Tensor]]]:
    options, tensors = decode_body(content, KEY, "the request")
    images = take_images(options, tensors)
    signal = ScoreOptions.model_validate(options).spec()
    expected = {"token_ids": torch.int32, "offsets": torch.int64, "rows": torch.int32}
    if signal.kind == "chosen":
        expected["ids"] = torch.int32
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if dtypes != expected:
        raise ValueError(f"tensors {dtypes}: expected {expected}")
    return signal, tensors, images


def _from_json(content: bytes, most_documents: int) -> tuple[SignalSpec, dict[str, Tensor]]:
    require_few_lists(content)
    body = ScoreBody.model_validate_json(content)
    _require_few(len(body.token_ids), most_documents)
    lengths = [len(tokens) for tokens in body.token_ids]
    rows = [(0, length) for length in lengths] if body.rows is None else body.rows
    tensors = {
        "token_ids": _int32("token_ids: expected ids", chain.from_iterable(body.token_ids)),
        "offsets": _offsets(lengths),
        "rows": _int32("rows: expected numbers", rows),
    }
    if body.ids is not None:
        tensors["ids"] = _int32("ids: expected as many for every row", chain.from_iterable(body.ids))
    return ScoreOptions(**body.model_dump(include=set(ScoreOptions.model_fields))).spec(), tensors


def _int32(what: str, values: Iterable[Any]) -> Tensor:
    try:
        return torch.tensor(list(values), dtype=torch.int32)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what}, each from −2³¹ to 2³¹ − 1 ({error})") from error


def _require_few(documents: int, most: int) -> None:
    if documents > most:
        raise ValueError(f"{documents} sequences: expected at most {most} per request")


def _with_ids(
    signal: SignalSpec, documents: Sequence[np.ndarray], ranges: Sequence[range], ids: Tensor | None
) -> list[DocumentRows]:
    if signal.kind != "chosen":
        if ids is not None:
            raise ValueError(f"ids with signal {signal.kind}: expected them only with chosen")
        return [DocumentRows(tokens, rows) for tokens, rows in zip(documents, ranges, strict=True)]
    shape = [sum(map(len, ranges)), signal.top_k]
    if ids is None or list(ids.shape) != shape:
        raise ValueError(f"ids of shape {None if ids is None else list(ids.shape)}: expected {shape}")
    parts = ids.split([len(rows) for rows in ranges])
    return [DocumentRows(*document) for document in zip(documents, ranges, parts, strict=True)]


def _options(signal: SignalSpec) -> dict[str, Any]:
    return {"signal": signal.kind, "dtype": signal.dtype, "top_k": signal.top_k, "temperature": signal.temperature}


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
