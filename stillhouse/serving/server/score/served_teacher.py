"""The teacher of a server: the model, sharded over the ranks of the job, and the files that clients download."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.data import check_vocabulary, load_tokenizer
from stillhouse.hashing import folder_hashes
from stillhouse.models import Decoder, ProofError, check_finite_weights, model_fingerprint, quantized_identity
from stillhouse.models.document_packing import PackingError
from stillhouse.models.packed_attention import activations_for
from stillhouse.parallel import (
    Degrees,
    Layout,
    ModelSource,
    choose_device,
    empty_decoder,
    is_first,
    join,
    load_weights,
    local_folder,
    process_count,
)
from stillhouse.proofs.layouts import build_proven_runner
from stillhouse.serving.server.accepted_images import AcceptedImages, load_processor_of
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.limits import SIGNALS, SIGNALS_OF_SHARDS, Limits
from stillhouse.serving.server.role import ModelOptions, longest_sequence, model_info
from stillhouse.serving.server.score.batch_broadcast import BatchBroadcast
from stillhouse.serving.server.score.score_routes import add_file_routes, add_signal_routes
from stillhouse.signals.scorer import Outcome, Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.teacher_folder import head_of, save_teacher

#: seconds without a collective after which a rank counts as hung
RANK_SECONDS = 600.0


@dataclass(eq=False)
class ServedTeacher:
    """A loaded teacher (a `Role`).

    folder: the files that clients download (configuration, tokenizer, head). identity: the hash of the weights.
    """

    name: str
    info: dict[str, Any]
    limits: Limits
    survives_failures: bool
    scorer: Scorer
    broadcast: BatchBroadcast
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    identity: str
    images: AcceptedImages

    def add_routes(self, application: Application) -> None:
        add_file_routes(application, self.folder)
        add_signal_routes(application, self.tokenizer, self.identity)

    def check(self, parts: Sequence[ScoreRequest]) -> None:
        self.images.check([(part.document.tokens, part.document.media) for part in parts], "images")

    def compute(self, parts: Sequence[ScoreRequest]) -> list[Outcome]:
        self.broadcast.send(parts)
        return self.scorer.score(parts)

    def between_batches(self) -> None:
        self.broadcast.beat()

    def end(self) -> None:
        self.broadcast.send_end()

    def follow(self) -> None:
        self.broadcast.follow(self.scorer)

    def description(self) -> list[str]:
        info, broadcast = self.info, self.broadcast
        over = "" if broadcast.is_single else f" over {broadcast.ranks.size} ranks"
        return [
            f"teacher {info['model']}: vocabulary of {info['vocabulary']:,} rows, width {info['width']:,}, "
            f"{info['quantize'] or info['dtype']} on {self.device.type}{over}",
            f"signals: {', '.join(info['signals'])}; at most {info['max_top_k']} ids per token, "
            f"{info['max_tokens']:,} tokens per sequence, {info['max_request_tokens']:,} per request",
            *self.images.description(),
        ]


def load_teacher(
    options: ModelOptions, folder: Path, batch_tokens: int, queue_tokens: int, max_top_k: int
) -> ServedTeacher:
    """Load a model, sharded over all processes of torchrun, and write the files for clients to `folder`.

    folder: an empty folder; only the first process writes to it. Raises ValueError if the model cannot be loaded, is
    damaged, or cannot be sharded over this number of processes.
    """
    device, source = choose_device(options.device), local_folder(options.name, options.revision)
    tokenizer = load_tokenizer(source)
    processor = load_processor_of(source, tokenizer) if options.images else None
    layout, is_single = Layout(Degrees(tensor=process_count())), process_count() == 1
    if options.quantize is not None and not is_single:
        raise ValueError(
            f"--quantize {options.quantize} under {process_count()} processes, which divide plain weights: expected "
            "one"
        )
    mesh = join(layout.degrees, device, RANK_SECONDS)
    model_source = (_whole_source if is_single else _sharded_source)(options, source, device)
    runner = build_proven_runner(layout, mesh, model_source, None)
    decoder = runner.decoders[0]
    check_vocabulary(tokenizer, decoder.vocabulary_rows, "teacher")
    images = AcceptedImages()
    if processor is not None:
        agreed = partial(mesh.ranks.all_raise, PackingError, ProofError)
        images = AcceptedImages.proven(decoder, processor, partial(proven_media_inputs, agreed=agreed))
    identity = quantized_identity(model_fingerprint(source), options.quantize)
    limits = Limits(
        decoder.vocabulary_rows,
        longest_sequence(decoder, batch_tokens),
        max(batch_tokens, queue_tokens // 4),
        max_top_k,
        SIGNALS if is_single else SIGNALS_OF_SHARDS,
        image_bytes=images.most_bytes,
    )
    info: dict[str, Any] = {}
    if is_first():
        with_head = decoder if is_single else head_of(source, options.dtype, multimodal=options.images)
        save_teacher(folder, with_head, tokenizer, with_head=True)
        info = model_info(options.name, decoder, tokenizer) | {
            "teacher": identity,
            "width": decoder.width,
            "chat_template": _template_hash(tokenizer),
            "files": {name: digest for name, digest in folder_hashes(folder).items() if digest},
            "quantize": options.quantize,
            "signals": list(limits.signals),
            "max_tokens": limits.max_tokens,
            "max_request_tokens": limits.max_request_tokens,
            "max_sequences": limits.max_sequences,
            "max_top_k": limits.most_ids,
            **images.info,
        }
    scorer, broadcast = Scorer(runner, device, images.inputs), BatchBroadcast(mesh)
    return ServedTeacher(
        options.name, info, limits, is_single, scorer, broadcast, device, tokenizer, folder, identity, images
    )


def _whole_source(options: ModelOptions, folder: str, device: torch.device) -> ModelSource:
    loaded = options.load(folder, device, "teacher")
    return ModelSource(lambda: loaded)


def _sharded_source(options: ModelOptions, folder: str, device: torch.device) -> ModelSource:
    build = partial(
        empty_decoder,
        folder,
        dtype=options.dtype,
        attention=options.attention,
        multimodal=options.images,
        activations=activations_for(options.attention, device),
    )

    def load(decoder: Decoder) -> None:
        load_weights(decoder, folder, device)
        check_finite_weights(decoder, "teacher")

    def frozen() -> Decoder:
        decoder: Decoder = build().requires_grad_(False)
        return decoder

    return ModelSource(frozen, load, name="teacher")


def _template_hash(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = tokenizer.chat_template
    text = template if isinstance(template, str) or template is None else repr(sorted(template.items()))
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()
