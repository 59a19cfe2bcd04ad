"""The bodies of requests for completions: JSON, or a safetensors body for a prompt with images."""

import json
from dataclasses import dataclass
from typing import Any

from stillhouse.data.media import MediaProcessor
from stillhouse.rollout.records import GenerationRequest, Sampling
from stillhouse.serving.client.apis.server_api import ServerApi
from stillhouse.serving.prompt_wire import encode_prompt


@dataclass(frozen=True)
class RequestBodies:
    """processor: that of the prompts' images; None for prompts without images."""

    api: ServerApi
    processor: MediaProcessor | None

    def encoded(
        self, model: str | None, request: GenerationRequest, sampling: Sampling, max_new_tokens: int
    ) -> bytes:
        """Raises ValueError for an image whose file has changed since the data was loaded."""
        body = self.for_ask(model, request, sampling, max_new_tokens)
        return body if isinstance(body, bytes) else json.dumps(body).encode()

    def for_ask(
        self, model: str | None, request: GenerationRequest, sampling: Sampling, max_new_tokens: int
    ) -> dict[str, Any] | bytes:
        """As `encoded`, for an `Ask`."""
        body = self.api.body(model, request.prompt_ids.tolist(), sampling, max_new_tokens, request.seed)
        if not request.media:
            return body
        assert self.processor is not None
        return encode_prompt(body, self.processor.read_files(request.media, request.prompt_ids))
