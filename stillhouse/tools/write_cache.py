"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The teacher runs in this job, or is served: then it is asked once, for any number of runs. The documents are divided
into shards once, by their order and size alone. Each process computes every n-th shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.config import ConfigError, RunConfig, TeacherConfig
from stillhouse.data import Documents, MicroBatch, PackedSequences
from stillhouse.models import Decoder, OutputProcessor
from stillhouse.parallel import watchdog
from stillhouse.run.inputs import RunData
from stillhouse.run.models import load_model, teacher_fingerprint
from stillhouse.run.setup import RunSetup
from stillhouse.serving.client import RemoteSignals
from stillhouse.signals.cache.content import problem_in
from stillhouse.signals.cache.files import Manifest, document_id, target_rows
from stillhouse.signals.extract import Extract
from stillhouse.signals.labelled import ExtractLabelled, LabelledRows
from stillhouse.signals.sampled_ids import Draw, DrawRows, uniform_numbers
from stillhouse.signals.signal_spec import DocumentRows, SignalKind, SignalSpec
from stillhouse.signals.teacher_folder import head_of, save_teacher
from stillhouse.tools.cache_folder import describe, joined, write_documents


@dataclass(frozen=True)
class Entry:
    """A document to be written: where it is, and which of its rows."""

    documents: Documents
    number: int
    rows: range

    @property
    def id(self) -> bytes:
        return document_id(self.documents.tokens(self.number))


def write_cache(
    config: RunConfig,
    out: Path,
    kind: SignalKind = "hidden",
    *,
    top_k: int = 64,
    dtype: str | None = None,
    with_label: bool = False,
    packed: bool = False,
    shard_bytes: int | None = None,
) -> Manifest:
    """Write the signals of a run's teacher for its training and held-out documents, or continue to write them.

    kind, top_k, dtype, with_label: of a teacher in this job. A served teacher is asked for `teacher.signal`.
    top_k: ids per token of "top_k", draws per token of "sampled"; both are at the temperature of the run's objective
    dtype: of the stored numbers; None: float32, or the teacher's own dtype for hidden states
    with_label: whether "top_k" also has the actual next token
    packed: whether ids and counts have as few bits as they need

    A collective of all processes of a job. Raises ConfigError for a configuration without a teacher, or with a server
    that is not the teacher that is meant, and ValueError for a folder in which something else was written, and for a
    teacher whose signals are not finite.
    """
    setup = RunSetup(config)
    if config.teacher is not None and config.teacher.url is not None:
        return _write_served(setup, out, packed=packed, shard_bytes=shard_bytes)
    teacher_config = _teacher_in_job(setup)
    device = setup.ranks.device
    data = setup.load_data()
    entries = list(cache_entries(data))
    teacher = load_model("teacher", str(teacher_config.model), teacher_config, device)
    if kind == "hidden":
        spec = SignalSpec("hidden", dtype or str(teacher.config.dtype).removeprefix("torch."), with_label=with_label)
    else:
        spec = SignalSpec(kind, dtype or "float32", top_k, config.objective.temperature, with_label)
    description = describe(
        spec,
        str(teacher_config.model),
        teacher_fingerprint(teacher_config),
        data.tokenizer,
        teacher.vocabulary_rows,
        teacher.config.get_text_config().hidden_size,
        packed=packed,
    )
    writer = _Writer(description, teacher, config.train.micro_batch_tokens, device)
    watchdog.enter("writing the cache", timed=False)
    return write_documents(
        out,
        description,
        [(entry.id, entry.rows) for entry in entries],
        lambda numbers: writer.compute([entries[number] for number in numbers]),
        lambda folder: save_teacher(folder, teacher, data.tokenizer, with_head=spec.is_exact),
        setup.ranks,
        shard_bytes,
    )


def _teacher_in_job(setup: RunSetup) -> TeacherConfig:
    """The teacher that writes the cache. Raises ConfigError if there is none in this job."""
    teacher = setup.config.teacher
    if setup.config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a cache has one teacher's signals; expected the section teacher, and a cache for each of them",
        )
    if teacher is None or teacher.model is None:
        raise ConfigError("teacher.model", "is missing: a cache is written by a teacher that is in this job")
    if teacher.cross_tokenizer is not None:
        raise ConfigError(
            "teacher.cross_tokenizer",
            f"got {teacher.cross_tokenizer}: a cache holds the signals of one tokenizer, expected null",
        )
    return teacher


def _write_served(setup: RunSetup, out: Path, *, packed: bool, shard_bytes: int | None) -> Manifest:
    """Write the signals that a served teacher gives."""
    ranks, store = setup.ranks, setup.stores["teacher"]
    assert isinstance(store, RemoteSignals)
    data = setup.load_data()
    setup.require_signals(data)
    folder = store.teacher_folder
    if folder is None or store.vocabulary is None:
        raise ConfigError("teacher.model", "is missing: a cache has a copy of the teacher's tokenizer")
    if store.signal.kind == "chosen":
        raise ConfigError("teacher.signal", "got chosen: these ids are the student's, so they cannot be cached")
    entries, model = list(cache_entries(data)), store.servers[0].model
    description = describe(
        store.signal, model, store.identity, data.tokenizer, store.vocabulary, store.width, packed=packed
    )

    def save(into: Path) -> None:
        save_teacher(into, head_of(folder), data.tokenizer, with_head=store.signal.is_exact)

    watchdog.enter("writing the cache", timed=False)
    try:
        documents = [(entry.id, entry.rows) for entry in entries]
        read = partial(_read_served, store, store.vocabulary, entries)
        return write_documents(out, description, documents, read, save, ranks, shard_bytes)
    finally:
        store.close()


def _read_served(
    store: RemoteSignals, vocabulary: int, entries: Sequence[Entry], numbers: Sequence[int]
) -> dict[str, Tensor]:
    """The signals of the rows of some of the documents. Raises ValueError if one is not a distribution."""
    chosen = [entries[number] for number in numbers]
    signals = store.read([DocumentRows(entry.documents.tokens(entry.number), entry.rows) for entry in chosen])
    for entry, tensors in zip(chosen, signals, strict=True):
        if problem := problem_in(store.signal, vocabulary, tensors):
            source = entry.documents.sources[entry.number]
            raise ValueError(f"the teacher's {problem} on {source}: nothing of this shard is written")
    return joined(signals)


@dataclass(frozen=True)
class _Writer:
    """Runs a teacher on documents. batch_tokens: how many tokens run through it at a time."""

    description: Manifest
    teacher: Decoder
    batch_tokens: int
    device: torch.device

    @torch.no_grad()
    def compute(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        """The signals of all rows of some documents."""
        offsets = np.concatenate([[0], np.cumsum([len(entry.rows) for entry in entries])])
        spec, width = self.description.signal, self.description.width
        tensors = {
            name: torch.zeros(int(offsets[-1]), *shape, dtype=dtype)
            for name, (shape, dtype) in spec.tensors(width).items()
        }
        for split in dict.fromkeys(id(entry.documents) for entry in entries):
            numbers = [number for number, entry in enumerate(entries) if id(entry.documents) == split]
            self._run(tensors, [entries[number] for number in numbers], offsets[numbers])
        return tensors

    def _run(self, tensors: dict[str, Tensor], entries: Sequence[Entry], starts: np.ndarray) -> None:
        """Run the teacher on documents, and write their rows to `tensors`; the rows of entry n start at starts[n]."""
        documents = entries[0].documents.select([entry.number for entry in entries])
        longest = int(documents.lengths_D.max())
        sequences = PackedSequences(documents, max_tokens=longest, seed=0, shuffle=False)
        first = torch.tensor([entry.rows.start for entry in entries])
        stop = torch.tensor([entry.rows.stop for entry in entries])
        at_a_time = max(1, self.batch_tokens // longest)
        for start in range(0, len(sequences), at_a_time):
            micro_batch = sequences.micro_batch(range(start, min(start + at_a_time, len(sequences))))
            document_T, position_T = micro_batch.document_T, micro_batch.position_ids_BS.flatten()
            known_T = document_T.clamp(min=0)
            stored_T = (document_T >= 0) & (position_T >= first[known_T]) & (position_T < stop[known_T])
            index_C = stored_T.nonzero()[:, 0]
            inputs = micro_batch.to(self.device).inputs
            processor, context = self._extracting(micro_batch, index_C, entries)
            signals = self.teacher(**inputs, processor=processor, context=context)
            into_C = torch.from_numpy(starts)[document_T[index_C]] + position_T[index_C] - first[document_T[index_C]]
            if problem := problem_in(self.description.signal, self.description.vocabulary, signals):
                raise ValueError(
                    f"the teacher's {problem} on {documents.sources[int(document_T[index_C[0]])]} or near it: "
                    "nothing of this shard is written; expected a teacher that can run in this dtype"
                )
            for name, value in signals.items():
                tensors[name][into_C] = value

    def _extracting(
        self, micro_batch: MicroBatch, index_C: Tensor, entries: Sequence[Entry]
    ) -> tuple[OutputProcessor, Any]:
        """The output processor of the signal, and its context for these rows of a micro-batch."""
        spec, on_device_C = self.description.signal, index_C.to(self.device)
        if spec.with_label:
            # a stored row predicts a token of the same document, which is the next one in the micro-batch
            labels_C = micro_batch.inputs["input_ids"].flatten()[index_C + 1]
            return ExtractLabelled(spec), LabelledRows(on_device_C, labels_C.to(self.device))
        if spec.kind != "sampled":
            return Extract(spec), on_device_C
        assert spec.top_k is not None
        document_C, position_C = micro_batch.document_T[index_C], micro_batch.position_ids_BS.flatten()[index_C]
        uniform_CM = torch.empty(len(index_C), spec.top_k, dtype=torch.float64)
        for document in document_C.unique().tolist():
            entry, is_of_it_C = entries[document], document_C == document
            numbers = uniform_numbers(entry.id, entry.rows, spec.top_k)
            uniform_CM[is_of_it_C] = torch.from_numpy(numbers)[position_C[is_of_it_C] - entry.rows.start]
        return Draw(spec), DrawRows(on_device_C, uniform_CM)


def data_splits(data: RunData) -> list[Documents]:
    """The training documents and the held-out documents of a run."""
    return [sequences.documents for sequences in (data.train, data.evaluation) if sequences is not None]


def cache_entries(data: RunData) -> Iterator[Entry]:
    """Every different document of a run that has a target, once."""
    seen: dict[bytes, range] = {}
    for documents in data_splits(data):
        for number in range(len(documents)):
            rows = target_rows(documents.targets(number))
            known = seen.setdefault(document_id(documents.tokens(number)), rows)
            if known is rows and len(rows):
                yield Entry(documents, number, rows)
            elif known != rows:
                raise ValueError(
                    f"{documents.sources[number]} has the tokens of another document and other targets: expected "
                    "objective.tokens=all, or data without such pairs"
                )
