"""The body of `POST /inference/v1/generate` for a prompt with images: a safetensors file.

Its tensors are those of `image_wire.py` for one document, the prompt. The value of `generate` in its header is the
JSON of a request without images, and `images` beside it.
"""

import json
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save

from stillhouse.data.media import MediaTensors
from stillhouse.data.render.media_inputs import DocumentMedia
from stillhouse.serving.image_wire import decode_body, decode_images, encode_images, take_images
from stillhouse.serving.strict_body import FirstWrong, TokenId, first_problem

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
    [of_prompt] = decode_images(*images, [np.array(ids, dtype=np.int32)])
    return json.dumps(body).encode(), of_prompt
