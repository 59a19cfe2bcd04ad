"""The role of a server: a set of routes, the model that computes their results, and the limits of their requests.

One role computes a teacher's signals (`served_teacher.py`), the other role generates completions (`generation.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.data import tokenizer_fingerprint
from stillhouse.models import Decoder, check_document_length, check_finite_weights, eos_ids
from stillhouse.models.families import ModelFacts
from stillhouse.models.varlen import activations_for
from stillhouse.serving.server.gate import refused
from stillhouse.serving.wire import WIRE_FORMAT

if TYPE_CHECKING:
    from stillhouse.serving.server.application import Application

MIB = 2**20


@dataclass(frozen=True)
class Limits:
    """The limits of a client's request. A request that exceeds a limit is refused before it reaches the model.

    vocabulary: the number of rows of the model's head. The other fields are maximum numbers.
    max_tokens: tokens of a sequence. max_request_tokens: tokens of a request. max_sequences: sequences of a request.
    max_top_k: ids per token. json_bytes: bytes of a JSON body. binary_bytes: bytes of a safetensors body without its
    images. image_bytes: bytes of the images of a body. bodies_bytes: bytes of all bodies in memory, without images.
    """

    vocabulary: int
    max_tokens: int
    max_request_tokens: int
    max_top_k: int
    max_sequences: int = 4096
    image_bytes: int = 0
    json_bytes: int = 8 * MIB
    binary_bytes: int = 64 * MIB
    bodies_bytes: int = 512 * MIB

    @property
    def most_ids(self) -> int:
        """The maximum number of ids per token of a signal: the smaller of `max_top_k` and the vocabulary."""
        return min(self.max_top_k, self.vocabulary)

    def id_outside(self, ids: np.ndarray, least: int = 0) -> int | None:
        """Return an id below `least` or beyond the vocabulary, or None if all ids are valid."""
        smallest, largest = int(ids.min()), int(ids.max())
        return smallest if smallest < least else largest if largest >= self.vocabulary else None

    def check_count(self, documents: int, param: str) -> None:
        if documents > self.max_sequences:
            raise refused(f"{documents} sequences: expected at most {self.max_sequences} per request", param)

    def check_documents(self, documents: Sequence[Sequence[int] | np.ndarray], param: str) -> None:
        """Raise RequestError for too many documents or tokens, an empty document, or an id outside the vocabulary."""
        self.check_count(len(documents), param)
        total = sum(map(len, documents))
        if total > self.max_request_tokens:
            raise refused(f"{total} tokens: expected at most {self.max_request_tokens} per request", param)
        for number, tokens in enumerate(documents):
            if not 1 <= len(tokens) <= self.max_tokens:
                raise refused(
                    f"sequence {number} has {len(tokens)} tokens: expected 1 to {self.max_tokens} (the smaller "
                    "of the model's number of positions and the server's --batch-tokens)",
                    param,
                )
            if (wrong := self.id_outside(np.asarray(tokens))) is not None:
                raise refused(
                    f"sequence {number} has the token id {wrong}: expected 0 to {self.vocabulary - 1}, the rows of "
                    "the model's head",
                    param,
                )


class Role(Protocol):
    """The model of a server, with the routes whose answers it computes.

    name: the model's name for clients. info: the answer of `GET /v1/info`; empty except on the first process.
    description: log lines that describe the served model; empty except on the first process.
    survives_failures: whether the server may continue after the computation of a batch has failed.
    """

    name: str
    info: dict[str, Any]
    description: list[str]
    limits: Limits
    survives_failures: bool

    def add_routes(self, application: "Application") -> None: ...

    def check(self, parts: Sequence[Any]) -> None:
        """Raise RequestError for images that the processor cannot have made, or placeholder tokens without images."""

    def compute(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Compute a batch. Returns, for each part, its result or a NotFiniteError."""

    def between_batches(self) -> None:
        """Do work that must not interrupt a batch. Called before each batch, and often while the queue is empty."""

    def end(self) -> None:
        """End the role's work. Called after the last batch."""


@dataclass(frozen=True)
class ModelOptions:
    """The options with which a server loads its model.

    name: a folder or a hub id. dtype: "auto" means the saved dtype. device: "auto" means a GPU if there is one.
    attention: see the key `student.attention` of a run. revision: the revision of a hub id.
    images: whether the model reads images.
    quantize: "int8", "nf4" or "fp8" (see `quantized.py`), only for a single process. None: do not quantize.
    """

    name: str
    dtype: str
    device: str
    attention: str | None
    revision: str | None
    quantize: str | None
    images: bool

    def load(self, source: str, device: torch.device, what: str, *, takes_adapters: bool = False) -> Decoder:
        """Load the model from the folder `source`, and freeze it. Raises ValueError if the model is damaged.

        what: the model's name in errors.
        takes_adapters: whether quantized layers compute as in a run that trains an adapter on them.
        """
        decoder = Decoder.from_pretrained(
            source,
            dtype=self.dtype,
            attention=self.attention,
            device=device,
            quantize=self.quantize,
            trained=takes_adapters,
            multimodal=self.images,
            activations=activations_for(self.attention, device),
        )
        decoder.requires_grad_(False).eval()
        check_finite_weights(decoder, what)
        return decoder


def model_info(name: str, decoder: Decoder, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of `GET /v1/info` that do not depend on the role."""
    return {
        "stillhouse": __version__,
        "wire": WIRE_FORMAT,
        "model": name,
        "vocabulary": decoder.vocabulary_rows,
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "eos_token_ids": list(eos_ids(tokenizer, decoder)),
    }


def longest_sequence(decoder: Decoder, batch_tokens: int) -> int:
    """Return the maximum length of a sequence: the smaller of the model's number of positions and `batch_tokens`."""
    reach = ModelFacts(decoder.config).max_positions
    longest = batch_tokens if reach is None else min(int(reach), batch_tokens)
    check_document_length(decoder.pretrained, longest, "teacher")
    return longest
