"""The teacher of a server: the model, sharded over the ranks of the job, and the files that clients download.

Rank 0 broadcasts each batch to the other tensor-parallel ranks as the bytes of one safetensors file, because decoding
this format cannot run code. It broadcasts the number of bytes first. Instead of this number, `_NOTHING` means that
there is no batch yet (so that the waiting ranks do not time out), and `_END` means that the server ends.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from stillhouse.data import check_vocabulary, load_tokenizer
from stillhouse.gguf.plain_folder import plain_folder
from stillhouse.hashing import folder_hashes
from stillhouse.models import Decoder, ProofError, check_finite_weights, model_fingerprint, quantized_identity
from stillhouse.models.document_packing import PackingError
from stillhouse.models.varlen import activations_for
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
from stillhouse.serving.server.role import Limits, ModelOptions, longest_sequence, model_info
from stillhouse.serving.server.score_routes import add_teacher_routes
from stillhouse.serving.wire import KEY, decode_images, document_tensors, header_of, take_images
from stillhouse.signals.extract import Ranked
from stillhouse.signals.scorer import Outcome, Scorer, ScoreRequest, proven_media_inputs
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec
from stillhouse.signals.teacher_folder import head_of, save_teacher

#: the signals of a single process, and of a teacher that is sharded over ranks ("sampled" needs all logits)
SIGNALS = ("hidden", "top_k", "chosen", "sampled")
SIGNALS_OF_SHARDS = ("hidden", "top_k", "chosen")
#: seconds without a batch after which rank 0 broadcasts `_NOTHING`
BEAT_SECONDS = 60.0
_NOTHING, _END = 0, -1
#: seconds without a collective after which a rank counts as hung
RANK_SECONDS = 600.0


class ServedTeacher:
    """A teacher (a `Role`), sharded over all processes of torchrun.

    folder: an empty folder for the files that clients download (configuration, tokenizer, head). Only the first
    process writes to this folder. Raises ValueError if the model cannot be loaded, is damaged, or cannot be sharded
    over this number of processes.
    """

    def __init__(self, options: ModelOptions, folder: Path, batch_tokens: int, queue_tokens: int, max_top_k: int):
        self.name, self._folder, self._device = options.name, folder, choose_device(options.device)
        source = local_folder(plain_folder(options.name), options.revision)
        self._tokenizer = load_tokenizer(source)
        processor = load_processor_of(source, self._tokenizer) if options.images else None
        layout = Layout(Degrees(tensor=process_count()))
        self._is_single = self.survives_failures = process_count() == 1
        if options.quantize is not None and not self._is_single:
            raise ValueError(
                f"--quantize {options.quantize} under {process_count()} processes: quantized weights cannot "
                "be sharded; expected one process"
            )
        mesh = join(layout.degrees, self._device, RANK_SECONDS)
        if self._is_single:
            loaded = options.load(source, self._device, "teacher")
            model_source = ModelSource(lambda: loaded)
        else:
            model_source = _sharded_source(options, source, self._device)
        runner = build_proven_runner(layout, mesh, model_source, None)
        decoder = runner.decoders[0]
        check_vocabulary(self._tokenizer, decoder.vocabulary_rows, "teacher")
        agreed = partial(mesh.ranks.all_raise, PackingError, ProofError)
        self._images = AcceptedImages(decoder, processor, partial(proven_media_inputs, agreed=agreed))
        self._identity = quantized_identity(model_fingerprint(source), options.quantize)
        self.limits = Limits(
            decoder.vocabulary_rows,
            longest_sequence(decoder, batch_tokens),
            max(batch_tokens, queue_tokens // 4),
            max_top_k,
            image_bytes=self._images.most_bytes,
        )
        self.info: dict[str, Any] = {}
        self.description: list[str] = []
        if is_first():
            with_head = decoder if self._is_single else head_of(source, options.dtype, multimodal=options.images)
            save_teacher(folder, with_head, self._tokenizer, with_head=True)
            self.info = self._info(options, decoder)
            over = "" if self._is_single else f" over {mesh.ranks.size} ranks"
            kind, limits = options.quantize or self.info["dtype"], self.limits
            self.description = [
                f"teacher {self.name}: vocabulary of {limits.vocabulary:,} rows, width {decoder.width:,}, "
                f"{kind} on {self._device.type}{over}",
                f"signals: {', '.join(self.info['signals'])}; at most {limits.most_ids} ids per token, "
                f"{limits.max_tokens:,} tokens per sequence, {limits.max_request_tokens:,} per request",
                *self._images.description,
            ]
        self._scorer, self._ranks = Scorer(runner, self._device, self._images.inputs), mesh.ranks
        self._sent = time.monotonic()

    def _info(self, options: ModelOptions, decoder: Decoder) -> dict[str, Any]:
        template, limits = self._tokenizer.chat_template, self.limits
        text = template if isinstance(template, str) or template is None else repr(sorted(template.items()))
        return model_info(options.name, decoder, self._tokenizer) | {
            "teacher": self._identity,
            "width": decoder.width,
            "chat_template": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
            "files": {name: digest for name, digest in folder_hashes(self._folder).items() if digest},
            "quantize": options.quantize,
            "signals": list(SIGNALS if self._is_single else SIGNALS_OF_SHARDS),
            "max_tokens": limits.max_tokens,
            "max_request_tokens": limits.max_request_tokens,
            "max_sequences": limits.max_sequences,
            "max_top_k": limits.most_ids,
            **self._images.info,
        }

    def add_routes(self, application: Application) -> None:
        add_teacher_routes(application, self._folder, self._tokenizer, self._identity)

    def check(self, parts: Sequence[ScoreRequest]) -> None:
        self._images.check([(part.document.tokens, part.document.media) for part in parts], "images")

    def compute(self, parts: Sequence[ScoreRequest]) -> list[Outcome]:
        if not self._is_single:
            content = torch.frombuffer(bytearray(_encoded(parts)), dtype=torch.uint8)
            self._broadcast(torch.tensor([len(content)]))
            self._broadcast(content)
            del content  # free the memory before the computation
        return self._scorer.score(parts)

    def between_batches(self) -> None:
        if not self._is_single and time.monotonic() - self._sent > BEAT_SECONDS:
            self._broadcast(torch.tensor([_NOTHING]))

    def end(self) -> None:
        if not self._is_single:
            self._broadcast(torch.tensor([_END]))

    def follow(self) -> None:
        """Compute the batches that the first process broadcasts, until it ends. Called on all other processes."""
        while (length := int(self._broadcast(torch.zeros(1, dtype=torch.int64)))) != _END:
            if length != _NOTHING:
                # no variable refers to the batch, because it would keep the batch in memory until the next batch
                self._scorer.score(_decoded(self._broadcast(torch.zeros(length, dtype=torch.uint8))))

    def _broadcast(self, values: Tensor) -> Tensor:
        values = values.to(self._device)
        dist.broadcast(values, 0, group=self._ranks.group)
        self._sent = time.monotonic()
        return values


def _sharded_source(options: ModelOptions, folder: str, device: torch.device) -> ModelSource:
    def frozen() -> Decoder:
        decoder: Decoder = empty_decoder(
            folder,
            dtype=options.dtype,
            attention=options.attention,
            multimodal=options.images,
            activations=activations_for(options.attention, device),
        )
        return decoder.requires_grad_(False)

    def load(decoder: Decoder) -> None:
        load_weights(decoder, folder, device)
        check_finite_weights(decoder, "teacher")

    return ModelSource(frozen, load, name="teacher")


def _encoded(parts: Sequence[ScoreRequest]) -> bytes:
    sent, tensors = document_tensors([part.document for part in parts])
    for number, part in enumerate(parts):
        if part.document.ids_NK is not None:
            tensors[f"ids.{number}"] = part.document.ids_NK.contiguous()
    wanted = [
        {"ranked": part.wanted.top_k} if isinstance(part.wanted, Ranked) else asdict(part.wanted) for part in parts
    ]
    return save(tensors, {KEY: json.dumps({"wanted": wanted} | sent)})


def _decoded(received: Tensor) -> list[ScoreRequest]:
    content = received.cpu().numpy().tobytes()
    tensors, header = load(content), header_of(content, KEY)
    token_ids, bounds = tensors["token_ids"].numpy(), tensors["offsets"].tolist()
    tokens = [token_ids[start:stop] for start, stop in pairwise(bounds)]
    images = decode_images(*take_images(header, tensors), tokens)
    requested = zip(tokens, tensors["rows"].tolist(), images, header["wanted"], strict=True)
    parts = []
    for number, (ids, rows, media, wanted) in enumerate(requested):
        document = DocumentRows(ids, range(*rows), tensors.get(f"ids.{number}"), media=media)
        signal = Ranked(wanted["ranked"]) if "ranked" in wanted else SignalSpec(**wanted)
        parts.append(ScoreRequest(document, signal))
    return parts
