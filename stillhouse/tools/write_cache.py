"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The teacher runs in this job or on servers, and scores each document once for any number of runs. The division into
shards depends only on the order and the sizes of the documents.

If the command is interrupted, a new one writes the missing shards. `cache.json` describes the cache. It is written
before the first shard, so that a command for another cache raises an error. The record of a shard is written after
the shard. The index is written last, and readers need it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RunConfig, TeacherConfig
from stillhouse.data import Documents, tokenizer_fingerprint
from stillhouse.data.media import MediaInputs, media_kind
from stillhouse.data.packing import SINGLE
from stillhouse.hashing import file_hash, json_hash
from stillhouse.loops.session import Data
from stillhouse.models import Decoder
from stillhouse.output.disk import (
    UNFINISHED,
    explained_write_errors,
    file_names,
    flush,
    hashes,
    replace_text,
    require_space,
)
from stillhouse.output.folder import folder_lock, is_leftover, library_versions
from stillhouse.parallel import ONE_PROCESS, Ranks, is_first, process_count, process_rank, wait_for_all, watchdog
from stillhouse.run.agreement import require_shared_folder
from stillhouse.run.data import load_run_data
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.setup import RunSetup
from stillhouse.run.teachers import require_signals
from stillhouse.signals import LocalModelStore, SignalStore
from stillhouse.signals.cache_files import (
    CACHE_KEY,
    INDEX,
    MANIFEST,
    SHARDS,
    TEACHER,
    CacheManifest,
    document_id,
    documents_hash,
    record_name,
    shard_name,
    shard_tensors,
    target_rows,
)
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec
from stillhouse.signals.teacher_folder import head_of, save_teacher

#: the largest size of a shard before packing, unless a single document needs more
SHARD_BYTES = 128 * 2**20


def write_cache(
    config: RunConfig,
    out: Path,
    kind: SignalKind = "hidden",
    *,
    top_k: int = 64,
    dtype: str | None = None,
    with_label: bool = False,
    shard_bytes: int | None = None,
) -> CacheManifest:
    """Write the signals of a run's teacher for its training and held-out documents, or continue to write them.

    kind, top_k, dtype, with_label: the signal of a teacher in this job; a served teacher has `teacher.signal`.
    top_k: ids per token for "top_k", samples per token for "sampled", both at the temperature of the run's objective.
    dtype: the dtype of the stored numbers. None: float32, or the teacher's own dtype for hidden states.
    with_label: whether "top_k" also includes the actual next token.

    All processes of a job must call this. Raises ConfigError if the configuration has no teacher, or a server has
    another teacher. Raises ValueError if the folder contains anything else, or if signals are not finite.
    """
    setup = RunSetup(config)
    is_served = config.teacher is not None and "signal" in config.teacher.source_kind.options
    teacher_config = None if is_served else _teacher_in_job(setup)
    # the documents must be those of a run from the cache, which does not know what the teacher reads
    data = load_run_data(config, setup.stores, fits_teachers=False)
    entries = list(cache_documents(data))
    if teacher_config is None:
        store, teacher = _served_teacher(setup, data)
    else:
        store, teacher = _local_teacher(setup, teacher_config, data, kind, top_k, dtype, with_label=with_label)
    if (inputs := data.train.media_inputs) is not None:
        other = data.teacher_media.get(SINGLE)
        teacher_media = None if other is None else json_hash(other.identity())
        teacher = replace(teacher, media=inputs.processor.pixels_identity, teacher_media=teacher_media)

    splits = [(split, split.as_read_by(SINGLE)) for split in data_splits(data)]
    teacher_inputs = None if inputs is None else inputs.teachers.get(SINGLE, inputs)

    def read(places: Sequence[int]) -> list[dict[str, Tensor]]:
        parts = groupby((entries[place] for place in places), key=lambda entry: entry.split)
        return [tensors for _, part in parts for tensors in _read(store, splits, teacher_inputs, list(part))]

    watchdog.enter("writing the cache", timed=False)
    documents = [entry.document for entry in entries]
    rows = [(document_id(document.tokens, document.media), document.rows) for document in documents]
    with closing(store):
        return write_documents(out, teacher, store.signal, rows, read, setup.ranks, shard_bytes or SHARD_BYTES)


class CacheEntry(NamedTuple):
    """A document of a cache: the number of its split, its number in it, and the rows that are stored."""

    split: int
    number: int
    document: DocumentRows


@dataclass(frozen=True)
class CacheTeacher:
    """The teacher of a cache that is being written.

    identity: a hash of the model's files.
    decoder: the model, or only its output head.
    media, teacher_media: those of `CacheManifest`.
    """

    name: str
    identity: str
    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    media: str | None = None
    teacher_media: str | None = None


def _read(
    store: SignalStore,
    splits: Sequence[tuple[Documents, Documents]],
    media_inputs: MediaInputs | None,
    entries: Sequence[CacheEntry],
) -> list[dict[str, Tensor]]:
    """Request signals of documents as the teacher reads them, and return them in the student's rows.

    splits: the documents of each split, for the student and as the teacher reads them. media_inputs: the teacher's.
    """
    requests: list[DocumentRows] = []
    rows: list[np.ndarray] = []
    for split, number, document in entries:
        documents, as_read = splits[split]
        teacher_rows = documents.substitutions_of(SINGLE).rows(number, len(document.tokens))
        # a row that predicts a token of media has no weight in a run: the row before it stands for it
        row_N = np.maximum.accumulate(teacher_rows[document.rows.start : document.rows.stop])
        media = None if media_inputs is None else media_inputs.of(as_read, number)
        span = range(int(row_N[0]), int(row_N[-1]) + 1)
        requests.append(DocumentRows(as_read.tokens(number), span, source=document.source, media=media))
        rows.append(row_N - span.start)
    return [
        {name: values[row_N] for name, values in tensors.items()}
        for tensors, row_N in zip(store.read(requests), rows, strict=True)
    ]


def _local_teacher(
    setup: RunSetup,
    config: TeacherConfig,
    data: Data,
    kind: SignalKind,
    top_k: int,
    dtype: str | None,
    *,
    with_label: bool,
) -> tuple[SignalStore, CacheTeacher]:
    """The teacher of a cache, loaded in this process, as a store of signals. Arguments: see `write_cache`."""
    name, identity, inputs = str(config.model), teacher_fingerprint(config), data.train.media_inputs
    processor = None
    if inputs is not None:
        media_kind(inputs.processor).require_layout(setup, inputs)
        teacher_inputs = inputs.teachers.get(SINGLE, inputs)
        assert teacher_inputs is not None, "only a routed teacher reads no media"
        processor = teacher_inputs.processor
    options = setup.ranks.device, setup.config.data.packing, None, processor is not None
    decoder = load_model("teacher", config, *options)
    if kind == "hidden":
        saved_dtype = str(decoder.config.dtype).removeprefix("torch.")
        spec = SignalSpec("hidden", dtype or saved_dtype, with_label=with_label)
    else:
        spec = SignalSpec(kind, dtype or "float32", top_k, setup.config.objective.temperature, with_label)
    tokens = setup.config.train.micro_batch_tokens
    store = LocalModelStore(name, identity, spec, lambda _: decoder, tokens, processor=processor, packs_all=True)
    for split in data_splits(data):
        store.require(split.as_read_by(SINGLE), "the data")
    store.start(setup.ranks.device)
    return store, CacheTeacher(name, identity, decoder, data.tokenizer)


def _teacher_in_job(setup: RunSetup) -> TeacherConfig:
    """The configuration of the cache's teacher. Raises ConfigError if no teacher runs in this job."""
    teacher = setup.config.teacher
    if setup.config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a cache has one teacher's signals; expected the section teacher, and a cache for each of them",
        )
    if teacher is None or not teacher.source_kind.runs_model:
        raise ConfigError("teacher.model", "is missing: a cache is written by a teacher that is in this job")
    if teacher.cross_tokenizer is not None:
        raise ConfigError(
            "teacher.cross_tokenizer",
            f"got {teacher.cross_tokenizer}: a cache holds the signals of one tokenizer, expected null",
        )
    return teacher


def _served_teacher(setup: RunSetup, data: Data) -> tuple[SignalStore, CacheTeacher]:
    """The teacher and its servers after their proof. Raises ConfigError for signals that cannot be cached."""
    store = setup.stores["teacher"]
    require_signals(setup.stores, setup.teachers, setup.objective, data, setup.ranks)
    if store.teacher_folder is None or store.vocabulary is None:
        raise ConfigError("teacher.model", "is missing: a cache has a copy of the teacher's tokenizer")
    if store.signal.kind == "chosen":
        raise ConfigError("teacher.signal", "got chosen: these ids are the student's, so they cannot be cached")
    head = head_of(store.teacher_folder)
    return store, CacheTeacher(store.model, store.identity, head, data.tokenizer)


def data_splits(data: Data) -> list[Documents]:
    """The training documents and the held-out documents of a run."""
    return [sequences.documents for sequences in (data.train, data.evaluation) if sequences is not None]


def cache_documents(data: Data) -> Iterator[CacheEntry]:
    """The distinct documents of a run that have targets."""
    seen: dict[bytes, range] = {}
    inputs = data.train.media_inputs
    for split, documents in enumerate(data_splits(data)):
        for number, source in enumerate(documents.sources):
            tokens, rows = documents.tokens(number), target_rows(documents.targets(number))
            media = None if inputs is None else inputs.of(documents, number)
            rows_before = seen.setdefault(document_id(tokens, media), rows)
            if rows_before is rows and len(rows):
                yield CacheEntry(split, number, DocumentRows(tokens, rows, source=source, media=media))
            elif rows_before != rows:
                raise ValueError(
                    f"{source} has the tokens of another document and other targets: expected "
                    "objective.tokens=all, or data without such pairs"
                )


def write_documents(
    out: Path,
    teacher: CacheTeacher,
    signal: SignalSpec,
    documents: Sequence[tuple[bytes, range]],
    read: Callable[[Sequence[int]], Sequence[dict[str, Tensor]]],
    ranks: Ranks,
    shard_bytes: int,
) -> CacheManifest:
    """Write a cache or its missing shards, with one shard in memory at a time. All n processes must call this; each
    writes every n-th shard.

    documents: the id and the rows of each document.
    read: returns the signals of several documents, given by their positions in `documents`.
    shard_bytes: the largest size of a shard in memory, before packing.

    Raises ValueError if the folder contains another cache or other files.
    """
    lengths = [len(rows) for _, rows in documents]
    if not lengths:
        raise ValueError(f"{out}: there are no documents with two tokens or more; nothing is written")
    shards = divide(lengths, max(1, shard_bytes // signal.bytes_per_token(teacher.decoder.width)))
    manifest = CacheManifest(
        signal,
        teacher.name,
        teacher.identity,
        tokenizer_fingerprint(teacher.tokenizer),
        teacher.decoder.vocabulary_rows,
        teacher.decoder.width,
        documents=len(documents),
        rows=sum(lengths),
        documents_hash=documents_hash(documents),
        shards=len(shards),
        versions=library_versions(),
        media=teacher.media,
        teacher_media=teacher.teacher_media,
    )
    with folder_lock(out) if is_first() else nullcontext():
        if is_first():
            _begin(out, manifest, teacher)
        require_shared_folder(out, ranks)
        share = range(process_rank(), len(shards), process_count())
        missing = [number for number in share if not _is_complete(out, number)]
        for number in tqdm(missing, desc="shards", unit="shard", disable=not is_first() or not missing):
            signals = read(shards[number])
            tensors = {name: torch.cat([values[name] for values in signals]) for name in signals[0]}
            tensors = shard_tensors([documents[document] for document in shards[number]], tensors)
            path = out / shard_name(number)
            unfinished = path.with_name(path.name + UNFINISHED)
            with explained_write_errors(path):
                save_file(tensors, unfinished, metadata={CACHE_KEY: f"{manifest.identity} {number}"})
                flush(unfinished)
                unfinished.rename(path)
            replace_text(out / record_name(number), json.dumps({"sha256": file_hash(path)}))
        wait_for_all()
        if is_first():
            written = {shard_name(number): _recorded_hash(out, number) for number in range(manifest.shards)}
            small = [name for name in file_names(out) if not name.startswith((SHARDS, INDEX, "."))]
            replace_text(out / INDEX, json.dumps({"sha256": {**hashes(out, small), **written}}, indent=1))
    return manifest


def _begin(out: Path, manifest: CacheManifest, teacher: CacheTeacher) -> None:
    """Create the folder's files, or check that an existing folder has a part of the same cache."""
    path = out / MANIFEST
    if path.is_file():
        existing = CacheManifest.from_json(path.read_text(encoding="utf-8"), path)
        different = [
            f"{name} {theirs!r} there and {ours!r} here" for name, theirs, ours in existing.differences(manifest)
        ]
        if different:
            raise ValueError(f"{out} has another cache: {'; '.join(different)}; expected another folder")
    elif not all(is_leftover(path) for path in out.iterdir()):
        raise ValueError(f"{out} is not empty and has no cache: expected a new folder")
    replace_text(path, manifest.to_json())
    with explained_write_errors(out):
        (out / SHARDS).mkdir(exist_ok=True)
        for leftover in out.rglob(f"*{UNFINISHED}"):
            leftover.unlink()
        complete = sum(shard.stat().st_size for shard in (out / SHARDS).glob("*.safetensors"))
        missing = manifest.rows * manifest.signal.bytes_per_token(manifest.width) - complete
        require_space(out, max(0, missing), ONE_PROCESS)
        save_teacher(out / TEACHER, teacher.decoder, teacher.tokenizer, with_head=manifest.signal.is_exact)


def _is_complete(out: Path, number: int) -> bool:
    """Whether a shard has a record and matches the hash in it."""
    if not (out / record_name(number)).is_file():
        return False
    return hashes(out, [shard_name(number)])[shard_name(number)] == _recorded_hash(out, number)


def _recorded_hash(out: Path, number: int) -> str:
    path = out / record_name(number)
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}): delete it, and start the command again") from error


def divide(lengths: Sequence[int], rows: int) -> list[range]:
    """Divide documents into shards of at most `rows` rows; a longer document has its own shard.

    lengths: the number of rows of each document.
    """
    borders, shard_rows = list[int](), rows + 1
    for number, length in enumerate(lengths):
        if shard_rows + length > rows:
            borders.append(number)
            shard_rows = 0
        shard_rows += length
    return [range(*shard) for shard in zip(borders, [*borders[1:], len(lengths)], strict=True)]
