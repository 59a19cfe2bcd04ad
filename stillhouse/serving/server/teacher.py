"""The teacher of a server: its model over the ranks of the job, its files for clients, and what identifies it."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse import __version__
from stillhouse.data import check_vocabulary, load_tokenizer, tokenizer_fingerprint
from stillhouse.models import (
    Decoder,
    check_document_length,
    check_finite_weights,
    eos_ids,
    model_fingerprint,
    quantized_identity,
)
from stillhouse.parallel import (
    Degrees,
    Layout,
    Mesh,
    ModelSource,
    Runner,
    build_runner,
    choose_device,
    empty_decoder,
    is_first,
    join,
    load_weights,
    local_folder,
    process_count,
)
from stillhouse.serving.server.limits import Limits
from stillhouse.signals.teacher_folder import head_of, save_teacher

HEAD = "model.safetensors"
#: after so many seconds without a sign of life, a rank counts as hung
RANK_SECONDS = 600.0


@dataclass(frozen=True)
class ServedTeacher:
    """A loaded teacher. folder: what clients can get: configuration, tokenizer, output head. info: `GET /v1/info`, on
    the first process."""

    name: str
    runner: Runner
    mesh: Mesh
    device: torch.device
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    identity: str
    info: dict[str, Any]


def load_teacher(
    name: str,
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attention: str | None = None,
    revision: str | None = None,
    quantize: str | None = None,
) -> ServedTeacher:
    """Load a model over all processes that torchrun started, and write what clients can get to `folder`.

    name: a folder or a hub id. folder: empty; only the first process writes to it. quantize: see `quantized.py`; for
    a single process. Raises ValueError for a model that
    cannot be loaded, is damaged, or cannot be divided over so many processes.
    """
    chosen = choose_device(device)
    source = local_folder(name, revision)
    tokenizer = load_tokenizer(source)
    layout = Layout(Degrees(tensor=process_count()))
    if quantize is not None and layout.degrees.processes > 1:
        raise ValueError(
            f"--quantize {quantize} under {process_count()} processes, which divide plain weights: expected one"
        )
    mesh = join(layout.degrees, chosen, RANK_SECONDS)
    if mesh.ranks.size == 1:
        decoder = Decoder.from_pretrained(source, dtype=dtype, attention=attention, device=chosen, quantize=quantize)
        decoder.requires_grad_(False).eval()
        check_finite_weights(decoder, "teacher")
        runner = build_runner(layout, mesh, ModelSource(lambda: decoder), None)
        with_head = decoder
    else:
        build = partial(empty_decoder, source, dtype=dtype, attention=attention)
        runner = build_runner(layout, mesh, _source(build, source, chosen), None)
        with_head = head_of(source, dtype) if is_first() else runner.students()[0]
    decoder = runner.students()[0]
    check_vocabulary(tokenizer, decoder.vocabulary_rows, "teacher")
    identity = quantized_identity(model_fingerprint(source), quantize)
    info: dict[str, Any] = {}
    if is_first():
        save_teacher(folder, with_head, tokenizer, with_head=True)
        info = {**_info(name, identity, decoder, tokenizer, folder), "quantize": quantize}
    return ServedTeacher(name, runner, mesh, chosen, tokenizer, folder, identity, info)


def longest_sequence(decoder: Decoder, batch_tokens: int) -> int:
    """The most tokens of a sequence: the model's positions, and those of a batch."""
    reach = getattr(decoder.config.get_text_config(), "max_position_embeddings", None)
    longest = batch_tokens if reach is None else min(int(reach), batch_tokens)
    check_document_length(decoder.pretrained, longest, "teacher")
    return longest


def with_limits(info: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The answer of `GET /v1/info`."""
    return {
        **info,
        "signals": list(limits.signals),
        "max_tokens": limits.max_tokens,
        "max_request_tokens": limits.max_request_tokens,
        "max_sequences": limits.max_sequences,
        "max_top_k": min(limits.max_top_k, limits.vocabulary),
    }


def _info(
    name: str, identity: str, decoder: Decoder, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    template = tokenizer.chat_template
    text = template if isinstance(template, str) or template is None else repr(sorted(template.items()))
    return {
        "stillhouse": __version__,
        "model": name,
        "teacher": identity,
        "vocabulary": decoder.vocabulary_rows,
        "width": int(decoder.config.get_text_config().hidden_size),
        "dtype": str(next(decoder.parameters()).dtype).removeprefix("torch."),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        "eos_token_ids": list(eos_ids(tokenizer, decoder)),
        "files": {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file()},
    }


def _source(build: Any, folder: str, device: torch.device) -> ModelSource:
    def weights(decoder: Decoder) -> None:
        load_weights(decoder, folder, device)
        check_finite_weights(decoder, "teacher")

    def frozen() -> Decoder:
        decoder: Decoder = build().requires_grad_(False)
        return decoder

    return ModelSource(frozen, weights, name="teacher")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
