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

from stillhouse.images.processor import ImageProcessor
from stillhouse.models import Decoder
from stillhouse.models.media_inputs import model_images, placeholder_ids, read_token_inputs
from stillhouse.rollout.records import GenerationRequest


class ImagePrompts:
    """Prompts of a model that reads images. processor: the model's; `None` for prompts without images.

    never: the ids of placeholders. A completion must not have them, because there is no feature for them.
    """

    def __init__(self, decoder: Decoder, processor: ImageProcessor | None):
        self._decoder, self._processor = decoder, processor
        self.never: list[int] = []
        if processor is not None:
            self.never = sorted({*processor.placeholder_ids, *placeholder_ids(decoder.pretrained)})

    def arguments(self, requests: Sequence[GenerationRequest], width: int, device: torch.device) -> dict[str, Tensor]:
        """Return the images and the kinds of tokens [B, S] of a batch; empty if no prompt has an image.

        width: S. Raises ValueError, with the request's number, for images without a processor, for an image that
        cannot be read or whose file has changed since the data was loaded, and for a prompt that ends with an image.
        """
        if not any(request.has_images for request in requests):
            return {}
        model, processor = self._decoder.pretrained, self._processor
        if processor is None:
            raise ValueError("prompts with images need the model's processor: expected Generator(..., processor=...)")
        for request in requests:
            # `generate` would count the next token's position on each axis from the image's last position
            if request.prompt_ids[-1] in self.never:
                raise ValueError(
                    f"request {request.number}: its prompt ends with an image: expected text behind it, such as the "
                    "beginning of the assistant's turn"
                )
        images = processor.join(self._tensors(processor, requests))
        arguments = model_images(model, self._decoder.backbone, images)
        if (name := processor.layout.token_types) is not None:
            types_BS = np.zeros((len(requests), width), dtype=np.int64)
            for row, request in enumerate(requests):
                types_BS[row, width - len(request.prompt_ids) :] = processor.token_types(request.prompt_ids)
            arguments |= read_token_inputs(model, {name: torch.from_numpy(types_BS)})
        return {name: value.to(device) for name, value in arguments.items()}

    @staticmethod
    def _tensors(processor: ImageProcessor, requests: Sequence[GenerationRequest]) -> list[Mapping[str, Tensor]]:
        """Return the images of each request. Those of the samples of a prompt are processed once."""
        made: dict[tuple[bytes, ...], Mapping[str, Tensor]] = {}
        for request in requests:
            key = tuple(image.sha256 for image in request.images)
            if key not in made and not request.image_tensors:
                try:
                    made[key] = processor.tensors_of(request.images, request.prompt_ids)
                except ValueError as error:
                    raise ValueError(f"request {request.number}: {error}") from error
        return [
            request.image_tensors or made[tuple(image.sha256 for image in request.images)] for request in requests
        ]
