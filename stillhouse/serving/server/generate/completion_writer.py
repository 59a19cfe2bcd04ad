"""The model of a server that generates completions; `POST /v1/weights` replaces the weights between two batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.data import check_vocabulary, load_tokenizer
from stillhouse.models import Decoder, NotFiniteError, model_fingerprint
from stillhouse.parallel import choose_device, local_folder
from stillhouse.rollout.generate import Generator, check_generation
from stillhouse.rollout.published_folder import AdapterBase
from stillhouse.rollout.records import Completion, Sampling
from stillhouse.rollout.sampler import stop_texts
from stillhouse.serving.server.accepted_images import AcceptedImages, load_processor_of
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.bodies import refused
from stillhouse.serving.server.generate.generate_routes import (
    GenerationPart,
    VersionedCompletion,
    add_generate_route,
    add_weights_route,
)
from stillhouse.serving.server.generate.weight_updates import FIRST_VERSION, WeightUpdates
from stillhouse.serving.server.limits import Limits
from stillhouse.serving.server.role import ModelOptions, longest_sequence, model_info


@dataclass(eq=False)
class CompletionWriter:
    """Generates the completions of a batch (a `Role`). Each request of a batch may have its own `Sampling`.

    base: what the decoder is, for adapters that were trained on it. weights_root: see `WeightUpdates`.
    """

    name: str
    info: dict[str, Any]
    limits: Limits
    decoder: Decoder
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    batch_tokens: int
    images: AcceptedImages
    base: AdapterBase
    weights_root: Path | None = None
    survives_failures: bool = True

    def __post_init__(self) -> None:
        self._updates = WeightUpdates(self.decoder, self.base, self.weights_root)

    def add_routes(self, application: Application) -> None:
        add_generate_route(application, self.info["eos_token_ids"])
        add_weights_route(application, self._updates)

    def check(self, parts: Sequence[GenerationPart]) -> None:
        self.images.check([(part.request.prompt_ids, part.images) for part in parts], "images")
        for part in parts:
            if part.request.prompt_ids[-1] in self.images.placeholder_ids:
                raise refused("the prompt ends with an image: expected text behind it", "images")

    def compute(self, parts: Sequence[GenerationPart]) -> list[VersionedCompletion | NotFiniteError]:
        groups: dict[Sampling, list[int]] = {}
        for number, part in enumerate(parts):
            groups.setdefault(part.sampling, []).append(number)
        outcomes: dict[int, VersionedCompletion | NotFiniteError] = {}
        for sampling, members in groups.items():
            generator = Generator(
                self.decoder,
                sampling,
                self.device,
                batch_tokens=self.batch_tokens,
                vocabulary=len(self.tokenizer),
                tokenizer=self.tokenizer,
                processor=None if self.images.inputs is None else self.images.inputs.processor,
            )
            try:
                completions = generator.generate([parts[number].request for number in members], 0)
            except NotFiniteError as error:
                outcomes |= dict.fromkeys(members, error)
                continue
            version = self._updates.version
            for number, completion in zip(members, completions, strict=True):
                stop = self._stop_text(completion, sampling)
                outcomes[number] = VersionedCompletion(completion, version, stop)
        return [outcomes[number] for number in range(len(parts))]

    def between_batches(self) -> None:
        self._updates.apply()

    def end(self) -> None:
        self._updates.close()

    def follow(self) -> None:
        raise AssertionError("a single process has the whole model")

    def description(self) -> list[str]:
        return [
            f"model {self.name}: vocabulary of {self.limits.vocabulary:,} rows, "
            f"{self.base.quantize or self.info['dtype']} on "
            f"{self.device.type}; completions of at most {self.limits.max_tokens:,} tokens with their prompt",
            *self.images.description(),
        ]

    def _stop_text(self, completion: Completion, sampling: Sampling) -> str | None:
        if completion.finish == "length" or completion.ids_N[-1] in sampling.eos_ids:
            return None
        return stop_texts([completion.ids_N.tolist()], sampling.stop, self.tokenizer)[0]


def load_writer(options: ModelOptions, batch_tokens: int, weights_root: Path | None = None) -> CompletionWriter:
    """Load a model in this process. Raises ValueError if it cannot be loaded, is damaged, or cannot generate."""
    device, source = choose_device(options.device), local_folder(options.name, options.revision)
    tokenizer = load_tokenizer(source)
    decoder = options.load(source, device, "model", takes_adapters=True)
    check_vocabulary(tokenizer, decoder.vocabulary_rows, "model")
    images = AcceptedImages()
    if options.images:
        processor = load_processor_of(source, tokenizer)
        images = AcceptedImages.proven(decoder, processor)
        check_generation(decoder, device, processor)
    else:
        check_generation(decoder, device)
    longest = longest_sequence(decoder, batch_tokens)
    limits = Limits(decoder.vocabulary_rows, longest, longest, 1, (), image_bytes=images.most_bytes)
    info = model_info(options.name, decoder, tokenizer) | {
        "generates": True,
        "version": FIRST_VERSION,
        "max_tokens": longest,
        **images.info,
    }
    base = AdapterBase(fingerprint=model_fingerprint(source), dtype=info["dtype"], quantize=options.quantize)
    return CompletionWriter(
        options.name, info, limits, decoder, device, tokenizer, batch_tokens, images, base, weights_root
    )
