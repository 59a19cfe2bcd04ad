"""The role of a server: a set of routes, and the model that computes their results.

`score/` computes a teacher's signals, and `generate/` generates completions. Both share the application, the queue,
the limits and the handling of connections.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.data import tokenizer_fingerprint
from stillhouse.models import Decoder, check_document_length, check_finite_weights, eos_ids
from stillhouse.models.families import ModelFacts
from stillhouse.models.varlen import activations_for
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.wire import WIRE_FORMAT

if TYPE_CHECKING:
    from stillhouse.serving.server.application import Application


class Role(Protocol):
    """name: the model's name for clients.
    info: the answer of `GET /v1/info`; empty except on the first process.
    survives_failures: whether the server may go on after the computation of a batch has failed.
    """

    name: str
    info: dict[str, Any]
    limits: Limits
    survives_failures: bool

    def add_routes(self, application: "Application") -> None: ...

    def check(self, parts: Sequence[Any]) -> None:
        """Raise RequestError for images that the model's processor would not make, and for their tokens in texts."""

    def compute(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Compute a batch: for each part, return the result or an error."""

    def between_batches(self) -> None:
        """Called before each batch, and several times a second while there is no request."""

    def end(self) -> None:
        """Called after the last batch."""

    def follow(self) -> None:
        """Called on all processes except the first: compute the first process's batches until that process ends."""

    def description(self) -> list[str]:
        """Lines for the log that describe the served model."""


@dataclass(frozen=True)
class ModelOptions:
    """The name of the served model, and the options for loading it.

    name: a folder or a hub id. dtype: "auto" is the saved dtype. device: "auto" is a GPU if the machine has one.
    attention: as `student.attention` of a run. revision: the revision of a hub id.
    images: whether it reads images.
    quantize: "int8", "nf4" or "fp8" (see `quantized.py`), only for a single process; None: do not quantize.
    """

    name: str
    dtype: str = "auto"
    device: str = "auto"
    attention: str | None = None
    revision: str | None = None
    quantize: str | None = None
    images: bool = False

    def load(self, source: str, device: torch.device, what: str, *, takes_adapters: bool = False) -> Decoder:
        """Load the model of the folder `source`, frozen. Raises ValueError, naming `what`, if it is damaged.

        takes_adapters: quantized layers compute as in a run that trains an adapter on them.
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
    """The fields of `GET /v1/info` that both roles have."""
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
    """The most tokens of a sequence: the smaller of the model's number of positions and `batch_tokens`."""
    reach = ModelFacts(decoder.config).max_positions
    longest = batch_tokens if reach is None else min(int(reach), batch_tokens)
    check_document_length(decoder.pretrained, longest, "teacher")
    return longest
