"""The client of `stillhouse serve`. The server gives every kind of signal; a request can have several documents.

With `--generate`, the server gives completions in vLLM's format instead, and loads new weights with one request.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.data import Documents, tokenizer_fingerprint
from stillhouse.data.media import MediaProcessor, MediaTensors
from stillhouse.display import escaped
from stillhouse.serving import SAFETENSORS
from stillhouse.serving.client.http_client import HttpAnswer, Size, parsed
from stillhouse.serving.client.pool import Ask, RefusedError, ServerRequest
from stillhouse.serving.client.server_api import Published, Scores, ServerInfo, ask_description, require
from stillhouse.serving.client.vllm import VllmApi
from stillhouse.serving.image_support import ImageSupport, require_accepted
from stillhouse.serving.wire import WIRE_FORMAT, decode_answer, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: the maximum number of tokens and of bytes of images in a request; a single document may have more
REQUEST_TOKENS, REQUEST_BYTES = 4096, 32 * 2**20
_WithImages = tuple[DocumentRows, MediaTensors | None]


class _Info(BaseModel):
    """The answer of `GET /v1/info`, with the field names of `ServerInfo`."""

    stillhouse: str
    model: str
    identity: str = Field(validation_alias="teacher")
    vocabulary: Size
    width: Size
    dtype: str
    max_tokens: Size
    request_tokens: Size = Field(validation_alias="max_request_tokens")
    max_top_k: Size
    signals: frozenset[str]
    files: dict[str, str]
    quantize: str | None = None
    images: ImageSupport | None = None


class _AnyInfo(BaseModel):
    """The fields that every server reports. wire: the format of bodies; 1 for servers that do not report it."""

    stillhouse: str
    wire: int = 1


class _Images(BaseModel):
    images: ImageSupport | None = None


class StillhouseApi(VllmApi):
    """The interface of `stillhouse serve`, which loads versions between batches, so a completion has one version."""

    name = "stillhouse"
    names_adapters = False

    def recognises(self, ask: Ask) -> bool:
        # a server that refuses the token is of this kind until `describe` reports the token
        return ask(self.kind.description_path, None).status in (401, 403) or super().recognises(ask)

    def describe(self, ask: Ask, url: str) -> ServerInfo:
        info = ask_description(_Info, ask, "/v1/info", self.kind.title)
        return ServerInfo(url, images=info.images, **info.model_dump(exclude={"stillhouse", "images"}))

    def calls(
        self, info: ServerInfo, spec: SignalSpec, width: int, documents: Sequence[DocumentRows]
    ) -> Iterator[ServerRequest[Scores]]:
        """Group the documents into requests. A document that exceeds a limit is a request by itself."""
        limits = np.array([min(REQUEST_TOKENS, info.request_tokens or REQUEST_TOKENS), REQUEST_BYTES, np.inf])
        if info.images is not None:
            limits = np.minimum(limits, [np.inf, info.images.max_bytes, info.images.max_images])
        group: list[_WithImages] = []
        total = np.zeros(3)
        for document in documents:
            images = None if document.media is None else document.media.read()
            sizes = np.array([len(document.tokens), 0, 0])
            if images is not None:
                sizes[1:] = sum(tensor.nbytes for tensor in images.tensors.values()), len(images.sizes)
            if group and (total + sizes > limits).any():
                yield _scoring(info, spec, width, group)
                group, total = [], np.zeros(3)
            group.append((document, images))
            total += sizes
        if group:
            yield _scoring(info, spec, width, group)

    def other_version(self, ask: Ask) -> str | None:
        answer = ask("/v1/info", None)
        if answer.status != 200:
            return None  # another kind of server, or a wrong token; a later request reports this
        server = parsed(_AnyInfo, answer.content, f"{answer.url} does not answer as {self.kind.title} does")
        versions = f"{answer.server} runs Stillhouse {server.stillhouse[:40]!r}, and this is {__version__}"
        if server.wire != WIRE_FORMAT:
            raise ValueError(
                f"{versions}, whose wire format is {WIRE_FORMAT}, not {server.wire}: expected the same version"
            )
        return None if server.stillhouse == __version__ else f"{versions}: expected the same version on both sides"

    def model_name(self, ask: Ask) -> str | None:
        return None

    def require_images(self, ask: Ask, url: str, processor: MediaProcessor, prompts: Documents) -> None:
        support = ask_description(_Images, ask, "/v1/info", self.kind.title).images
        require_accepted(url, support, prompts, processor, "data.train")

    def load_weights(self, ask: Ask, published: Published) -> bool:
        body = {"folder": str(published.folder), "version": published.label, "manifest": published.manifest}
        require(ask("/v1/weights", body), "loading the weights", self.kind.hint)
        return True

    def tokenizer_difference(
        self, ask: Ask, model: str | None, tokenizer: PreTrainedTokenizerBase, text: str
    ) -> str | None:
        info = require(ask("/v1/info", None), "/v1/info", self.kind.hint)
        is_same = isinstance(info, dict) and info.get("tokenizer") == tokenizer_fingerprint(tokenizer)
        return None if is_same else "their fingerprints differ"


def _scoring(info: ServerInfo, spec: SignalSpec, width: int, group: Sequence[_WithImages]) -> ServerRequest[Scores]:
    documents, images = [document for document, _ in group], [read for _, read in group]

    def parse(response: HttpAnswer) -> Scores:
        teacher, scores = decode_answer(response.content, spec, width, documents)
        if teacher != info.identity:
            raise RefusedError(
                f"{response.server} serves another teacher now (hash {escaped(teacher[:12])}) than when "
                f"this run started ({str(info.identity)[:12]}): start the server with the same weights again"
            )
        return scores

    tokens = sum(len(document.tokens) for document in documents)
    content = encode_request(spec, documents, images)
    most_bytes = 2**16 + sum(spec.bytes_per_token(width) * len(document.rows) + 8 for document in documents)
    return ServerRequest("/v1/score", content, SAFETENSORS, parse, tokens, most_bytes)
