"""The images of prompts as arguments of transformers' `generate`.

`generate` runs the vision tower once, for the tokens of the prompts, and computes the rotary positions of images
and of the new tokens itself, from the ids and kinds of tokens. Prompts are padded on the left, and the images of a
batch are in the order of its rows.

B prompts, S tokens of the longest prompt.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from stillhouse.data.media import MediaProcessor
from stillhouse.models import Decoder
from stillhouse.models.vision_language import model_media, placeholder_ids, read_token_inputs
from stillhouse.rollout.records import GenerationRequest


def prompt_arguments(
    processor: MediaProcessor, decoder: Decoder, requests: Sequence[GenerationRequest], width: int
) -> dict[str, Tensor]:
    """Return the images and the kinds of tokens [B, S] of a batch in which a prompt has an image. width: S.

    Raises ValueError, with the request's number, for an image that cannot be read or whose file has changed since the
    data was loaded, and for a prompt that ends with an image.
    """
    model = decoder.pretrained
    placeholders = {*processor.placeholder_ids, *placeholder_ids(model)}
    for request in requests:
        # `generate` would count the next token's position on each axis from the image's last position
        if request.prompt_ids[-1] in placeholders:
            raise ValueError(
                f"request {request.number}: its prompt ends with an image: expected text behind it, such as the "
                "beginning of the assistant's turn"
            )
    arguments = model_media(model, decoder.backbone, processor.join(media_tensors(processor, requests)))
    types_BS: dict[str, np.ndarray] = {}
    for row, request in enumerate(requests):
        for name, types_S in processor.token_types(request.prompt_ids).items():
            types_BS.setdefault(name, np.zeros((len(requests), width), dtype=np.int64))[row, -len(types_S) :] = (
                types_S
            )
    return arguments | read_token_inputs(model, {name: torch.from_numpy(value) for name, value in types_BS.items()})


def media_tensors(processor: MediaProcessor, requests: Sequence[GenerationRequest]) -> list[Mapping[str, Tensor]]:
    """Return the images of each request. Those of the samples of a prompt are processed once."""
    made: dict[tuple[bytes, ...], Mapping[str, Tensor]] = {}
    for request in requests:
        key = tuple(image.sha256 for image in request.media)
        if key not in made and not request.media_tensors:
            try:
                made[key] = processor.read_files(request.media, request.prompt_ids).tensors
            except ValueError as error:
                raise ValueError(f"request {request.number}: {error}") from error
    return [request.media_tensors or made[tuple(image.sha256 for image in request.media)] for request in requests]
