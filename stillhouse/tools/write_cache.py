"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The teacher runs in this job or on servers, and scores each document once for any number of runs. The division into
shards depends only on the order and the sizes of the documents, so that the same command can continue after an
interruption. `cache.json`, which describes the cache, is written before the first shard. The record of a shard is
written after the shard. The index, which readers need, is written at the end.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

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

#: the largest size of the signals in a shard, unless a single document needs more
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

    `kind`, `top_k`, `dtype` and `with_label` apply to a teacher in this job. Servers give the signal
    `teacher.signal`. The signals "top_k" and "sampled" have the temperature of the run's objective.

    top_k: the number of ids per token for "top_k", or of samples per token for "sampled".
    dtype: the dtype of the stored numbers. None means the teacher's dtype for hidden states, and otherwise float32.
    with_label: whether "top_k" also includes the actual next token.
    shard_bytes: replaces `SHARD_BYTES`.

    All processes of a job must call this. Raises ConfigError if the configuration has no teacher, or if a server
    serves another one. Raises ValueError if the folder contains other files, or if signals are not finite.
    """
    setup = RunSetup(config)
    config = setup.config
    is_served = config.teacher is not None and "signal" in config.teacher.source_kind.options
    teacher = None if is_served else _teacher_in_job(setup)
    # documents that are too long in the teacher's tokens are kept, because a run with the cache also keeps them
    data = load_run_data(config, setup.stores, fits_teachers=False)
    entries = list(cache_documents(data))
    if teacher is None:
        store, decoder = _served_teacher(setup, data)
    else:
        store, decoder = _local_teacher(setup, teacher, data, kind, top_k, dtype, with_label=with_label)
    inputs, other = data.train.media_inputs, data.teacher_media.get(SINGLE)
    splits = [(split, split.as_read_by(SINGLE)) for split in data_splits(data)]
    teacher_inputs = None if inputs is None else inputs.teachers.get(SINGLE, inputs)
    read = partial(_read, store, splits, teacher_inputs, entries)
    watchdog.enter("writing the cache", timed=False)
    with closing(store):
        documents = [entry.document for entry in entries]
        rows = [(document_id(document.tokens, document.media), document.rows) for document in documents]
        if not rows:
            raise ValueError(f"{out}: there are no documents with two tokens or more; nothing is written")
        token_bytes = store.signal.bytes_per_token(decoder.width)
        shards = divide([len(part) for _, part in rows], max(1, (shard_bytes or SHARD_BYTES) // token_bytes))
        manifest = CacheManifest(
            store.signal,
            store.model if is_served else store.name,
            store.identity,
            tokenizer_fingerprint(data.tokenizer),
            decoder.vocabulary_rows,
            decoder.width,
            documents=len(rows),
            rows=sum(len(part) for _, part in rows),
            documents_hash=documents_hash(rows),
            shards=len(shards),
            versions=library_versions(),
            media=None if inputs is None else inputs.processor.pixels_identity,
            teacher_media=None if inputs is None or other is None else json_hash(other.identity()),
        )
        copy_teacher = partial(save_teacher, teacher=decoder, tokenizer=data.tokenizer)
        _write_documents(out, manifest, rows, shards, read, copy_teacher, setup.ranks)
    return manifest


class CacheEntry(NamedTuple):
    """A document of a cache: the number of its split, the document's number in the split, and the stored rows."""

    split: int
    number: int
    document: DocumentRows


def _read(
    store: SignalStore,
    splits: Sequence[tuple[Documents, Documents]],
    media_inputs: MediaInputs | None,
    entries: Sequence[CacheEntry],
    places: Sequence[int],
) -> list[dict[str, Tensor]]:
    """Request the signals of the documents `entries[place]`, and return the signals of each document's stored rows.

    splits: for each split, its documents as the student reads them, and as the teacher reads them.
    media_inputs: makes the teacher's media inputs; None without media. places: indices into `entries`.
    """
    result: list[dict[str, Tensor]] = []
    for split, part in groupby((entries[place] for place in places), key=lambda entry: entry.split):
        documents, as_read = splits[split]
        substitutions = documents.substitutions_of(SINGLE)
        requests, rows = list[DocumentRows](), list[np.ndarray]()
        for _, number, document in part:
            teacher_rows = substitutions.rows(number, len(document.tokens))
            # a row that predicts a media token has no weight in a run, so the signal of the row before it is stored
            row_N = np.maximum.accumulate(teacher_rows[document.rows.start : document.rows.stop])
            media = None if media_inputs is None else media_inputs.of(as_read, number)
            span = range(int(row_N[0]), int(row_N[-1]) + 1)
            requests.append(DocumentRows(as_read.tokens(number), span, source=document.source, media=media))
            rows.append(row_N - span.start)
        for tensors, row_N in zip(store.read(requests), rows, strict=True):
            result.append({name: values[row_N] for name, values in tensors.items()})
    return result


def _local_teacher(
    setup: RunSetup,
    config: TeacherConfig,
    data: Data,
    kind: SignalKind,
    top_k: int,
    dtype: str | None,
    *,
    with_label: bool,
) -> tuple[SignalStore, Decoder]:
    """Load the teacher of a cache in this process, as a store of signals. Arguments: see `write_cache`."""
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
    return store, decoder


def _teacher_in_job(setup: RunSetup) -> TeacherConfig:
    """Return the configuration of the cache's teacher. Raises ConfigError if no teacher runs in this job."""
    teacher = setup.config.teacher
    if setup.config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a cache has the signals of one teacher: expected the section teacher instead; write a cache per teacher",
        )
    if teacher is None or not teacher.source_kind.runs_model:
        raise ConfigError("teacher.model", "is missing: expected the model whose signals are cached")
    if teacher.cross_tokenizer is not None:
        raise ConfigError(
            "teacher.cross_tokenizer",
            f"got {teacher.cross_tokenizer}: a cache holds the signals of one tokenizer, expected null",
        )
    return teacher


def _served_teacher(setup: RunSetup, data: Data) -> tuple[SignalStore, Decoder]:
    """Check that the servers have the teacher, and return their store and the teacher's head. Raises ConfigError for
    signals that cannot be cached.
    """
    store = setup.stores["teacher"]
    require_signals(setup.stores, setup.teachers, setup.objective, data, setup.ranks)
    if store.teacher_folder is None or store.vocabulary is None:
        raise ConfigError("teacher.model", "is missing: a cache has a copy of the tokenizer of this model")
    if store.signal.kind == "chosen":
        raise ConfigError("teacher.signal", "got chosen, which cannot be cached, because the student chooses the ids")
    return store, head_of(store.teacher_folder)


def data_splits(data: Data) -> list[Documents]:
    """Return the training documents and the held-out documents of a run."""
    return [sequences.documents for sequences in (data.train, data.evaluation) if sequences is not None]


def cache_documents(data: Data) -> Iterator[CacheEntry]:
    """Yield the distinct documents of a run that have targets."""
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
                    f"{source} has the same tokens as another document, but other targets: expected "
                    "objective.tokens=all, or data without such pairs"
                )


def _write_documents(
    out: Path,
    manifest: CacheManifest,
    documents: Sequence[tuple[bytes, range]],
    shards: Sequence[range],
    read: Callable[[Sequence[int]], Sequence[dict[str, Tensor]]],
    copy_teacher: Callable[..., None],
    ranks: Ranks,
) -> None:
    """Write a cache or its missing shards, with one shard in memory at a time. All n processes must call this; each
    writes every n-th shard. Raises ValueError if the folder contains another cache or other files.

    documents: the id and the rows of each document. shards: for each shard, the indices of its documents.
    read: returns the signals of the documents with the given indices.
    copy_teacher: writes the teacher's configuration, tokenizer and head.
    """
    with folder_lock(out) if is_first() else nullcontext():
        if is_first():
            _begin(out, manifest, copy_teacher)
        require_shared_folder(out, ranks)
        share = range(process_rank(), len(shards), process_count())
        missing = [
            number
            for number in share
            if not (out / record_name(number)).is_file()
            or _recorded_hash(out, number) not in hashes(out, [shard_name(number)]).values()
        ]
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


def _begin(out: Path, manifest: CacheManifest, copy_teacher: Callable[..., None]) -> None:
    """Create the folder's files, or check that an existing folder contains a part of the same cache."""
    path = out / MANIFEST
    if path.is_file():
        existing = CacheManifest.from_json(path.read_text(encoding="utf-8"), path)
        if differences := existing.differences(manifest):
            words = [f"{name} {theirs!r}, and this command has {ours!r}" for name, theirs, ours in differences]
            raise ValueError(f"{out} has another cache: {'; '.join(words)}; expected another folder")
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
        copy_teacher(out / TEACHER, with_head=manifest.signal.is_exact)


def _recorded_hash(out: Path, number: int) -> str:
    path = out / record_name(number)
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is missing or damaged ({error}): delete it, and start the command again") from error


def divide(lengths: Sequence[int], rows: int) -> list[range]:
    """Return the indices of each shard's documents. A shard has at most `rows` rows, or one longer document.

    lengths: the number of rows of each document.
    """
    borders, shard_rows = list[int](), rows + 1
    for number, length in enumerate(lengths):
        if shard_rows + length > rows:
            borders.append(number)
            shard_rows = 0
        shard_rows += length
    return [range(*shard) for shard in pairwise([*borders, len(lengths)])]
