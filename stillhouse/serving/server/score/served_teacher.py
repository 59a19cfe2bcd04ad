"""The teacher of a server: the model, sharded over the ranks of the job, and the files that clients download.

Rank 0, which handles HTTP, broadcasts each batch to the other tensor-parallel ranks as the bytes of one safetensors
file: its documents as tensors, and their options as JSON in the header. So received bytes cannot run code. The number
of bytes is sent before each batch. Two special values of it mean that there is no batch yet (sent so that the
collective does not time out), and that the server ends.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.data import check_vocabulary, load_tokenizer
from stillhouse.hashing import folder_hashes
from stillhouse.models import Decoder, ProofError, check_finite_weights, model_fingerprint, quantized_identity
from stillhouse.models.document_packing import PackingError
from stillhouse.models.varlen import activations_for
from stillhouse.parallel import (
    Degrees,
    Layout,
    Mesh,
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
from stillhouse.serving.image_wire import decode_images, encode_images, header_of, take_images
from stillhouse.serving.server.accepted_images import AcceptedImages, load_processor_of
from stillhouse.serving.server.application import Application
from stillhouse.serving.server.limits import SIGNALS, SIGNALS_OF_SHARDS, Limits
from stillhouse.serving.server.role import ModelOptions, longest_sequence, model_info
from stillhouse.serving.server.score.score_routes import add_file_routes, add_signal_routes
from stillhouse.serving.wire import KEY, document_tensors, read_images
from stillhouse.signals.extract import Ranked
from stillhouse.signals.scorer import Outcome, Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec
from stillhouse.signals.teacher_folder import head_of, save_teacher

#: seconds without a batch after which rank 0 broadcasts `_NOTHING`
BEAT_SECONDS = 60.0
_NOTHING, _END = 0, -1


class BatchBroadcast:
    """Broadcasts batches over the tensor-parallel ranks. A single process sends nothing."""

    def __init__(self, mesh: Mesh):
        self.ranks, self._device = mesh.ranks, mesh.device
        self._sent = time.monotonic()

    @property
    def is_single(self) -> bool:
        return self.ranks.size == 1

    def send(self, parts: Sequence[ScoreRequest]) -> None:
        if self.is_single:
            return
        content = torch.frombuffer(bytearray(_encoded(parts)), dtype=torch.uint8)
        self._broadcast(torch.tensor([len(content)]))
        self._broadcast(content)

    def beat(self) -> None:
        """Broadcast `_NOTHING` if the last broadcast is older than `BEAT_SECONDS`, so that no rank times out."""
        if not self.is_single and time.monotonic() - self._sent > BEAT_SECONDS:
            self._broadcast(torch.tensor([_NOTHING]))

    def send_end(self) -> None:
        self._broadcast(torch.tensor([_END]))

    def follow(self, scorer: Scorer) -> None:
        """Called on all ranks except 0: compute the batches that rank 0 broadcasts, until `_END`."""
        while (length := int(self._broadcast(torch.zeros(1, dtype=torch.int64)))) != _END:
            if length != _NOTHING:
                content = self._broadcast(torch.zeros(length, dtype=torch.uint8))
                scorer.score(_decoded(content.cpu().numpy().tobytes()))

    def _broadcast(self, values: Tensor) -> Tensor:
        if not self.is_single:
            values = values.to(self._device)
            dist.broadcast(values, 0, group=self.ranks.group)
            self._sent = time.monotonic()
        return values


def _encoded(parts: Sequence[ScoreRequest]) -> bytes:
    tensors = document_tensors([part.document for part in parts])
    for number, part in enumerate(parts):
        if part.document.ids_NK is not None:
            tensors[f"ids.{number}"] = part.document.ids_NK.contiguous()
    wanted = [
        {"ranked": part.wanted.top_k} if isinstance(part.wanted, Ranked) else asdict(part.wanted) for part in parts
    ]
    images = read_images([part.document for part in parts])
    image_tensors, sent = encode_images(
        [(part.document.tokens, part_images) for part, part_images in zip(parts, images, strict=True)]
    )
    return save(tensors | image_tensors, {KEY: json.dumps({"wanted": wanted} | sent)})


def _decoded(content: bytes) -> list[ScoreRequest]:
    tensors, header = load(content), header_of(content, KEY)
    token_ids, bounds = tensors["token_ids"].numpy(), tensors["offsets"].tolist()
    tokens = [token_ids[start:stop] for start, stop in pairwise(bounds)]
    images = decode_images(*take_images(header, tensors), tokens)
    parts = []
    for number, (document_tokens, rows, wanted) in enumerate(
        zip(tokens, tensors["rows"].tolist(), header["wanted"], strict=True)
    ):
        document = DocumentRows(document_tokens, range(*rows), tensors.get(f"ids.{number}"), media=images[number])
        parts.append(ScoreRequest(document, Ranked(wanted["ranked"]) if "ranked" in wanted else SignalSpec(**wanted)))
    return parts


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
