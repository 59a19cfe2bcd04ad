"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The teacher runs in this job or on servers, and scores each document once for any number of runs. The division into
shards depends only on the order and the sizes of the documents.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from torch import Tensor

from stillhouse.config import ConfigError, RunConfig, TeacherConfig
from stillhouse.data import Documents
from stillhouse.data.media import MediaInputs, media_kind
from stillhouse.data.packing import SINGLE
from stillhouse.hashing import json_hash
from stillhouse.loops.session import Data
from stillhouse.parallel import watchdog
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.setup import RunSetup
from stillhouse.signals import LocalModelStore, SignalStore
from stillhouse.signals.cache_files import CacheManifest, document_id, target_rows
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec
from stillhouse.signals.teacher_folder import head_of
from stillhouse.tools.cache_folder import CacheTeacher, write_documents


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
    data = setup.load_data(fits_teachers=False)
    entries, reader = list(cache_documents(data)), _Reader.of(data)
    if teacher_config is None:
        store, teacher = _served_teacher(setup, data)
    else:
        store, teacher = _local_teacher(setup, teacher_config, data, kind, top_k, dtype, with_label=with_label)
    if (inputs := data.train.media_inputs) is not None:
        other = data.teacher_media.get(SINGLE)
        teacher_media = None if other is None else json_hash(other.identity())
        teacher = replace(teacher, media=inputs.processor.pixels_identity, teacher_media=teacher_media)

    def read(places: Sequence[int]) -> list[dict[str, Tensor]]:
        parts = (list(part) for _, part in groupby(places, key=lambda place: entries[place].split))
        return [tensors for part in parts for tensors in reader.read(store, [entries[place] for place in part])]

    watchdog.enter("writing the cache", timed=False)
    documents = [entry.document for entry in entries]
    rows = [(document_id(document.tokens, document.media), document.rows) for document in documents]
    description = teacher.describe(store.signal)
    with closing(store):
        return write_documents(out, description, rows, read, teacher.save, setup.ranks, shard_bytes)


class CacheEntry(NamedTuple):
    """A document of a cache: the number of its split, its number in it, and the rows that are stored."""

    split: int
    number: int
    document: DocumentRows


@dataclass(frozen=True)
class _Reader:
    """Requests the signals of documents as the teacher reads them, and returns them in the student's rows.

    splits: the documents of each split, for the student and as the teacher reads them.
    media_inputs: those of the teacher.
    """

    splits: Sequence[tuple[Documents, Documents]]
    media_inputs: MediaInputs | None

    @classmethod
    def of(cls, data: Data) -> Self:
        inputs = data.train.media_inputs
        teacher_inputs = None if inputs is None else inputs.teacher_inputs(SINGLE)
        return cls([(split, split.as_read_by(SINGLE)) for split in data_splits(data)], teacher_inputs)

    def read(self, store: SignalStore, entries: Sequence[CacheEntry]) -> list[dict[str, Tensor]]:
        requests: list[DocumentRows] = []
        rows: list[np.ndarray] = []
        for split, number, document in entries:
            documents, as_read = self.splits[split]
            teacher_rows = documents.substitutions_of(SINGLE).rows(number, len(document.tokens))
            # a row that predicts a token of media has no weight in a run: the row before it stands for it
            row_N = np.maximum.accumulate(teacher_rows[document.rows.start : document.rows.stop])
            media = None if self.media_inputs is None else self.media_inputs.of(as_read, number)
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
        teacher_inputs = inputs.teacher_inputs(SINGLE)
        assert teacher_inputs is not None, "only a routed teacher reads no media"
        processor = teacher_inputs.processor
    options = setup.ranks.device, setup.config.data.packing, None, processor is not None
    decoder = load_model("teacher", name, config, *options)
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
    setup.require_signals(data)
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
