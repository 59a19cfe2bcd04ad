"""Writes a cache of a teacher's signals for the data of a run: the command `stillhouse cache`.

The documents are divided into shards once, by their order and size alone. Each process computes every n-th shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import Documents, MicroBatch, PackedSequences, tokenizer_fingerprint
from stillhouse.models import Decoder, OutputProcessor
from stillhouse.parallel import watchdog
from stillhouse.run.agreement import library_versions
from stillhouse.run.inputs import RunData, load_run_data
from stillhouse.run.models import load_model, model_fingerprints
from stillhouse.run.session import connect_ranks
from stillhouse.signals.cache.content import problem_in
from stillhouse.signals.cache.files import (
    Manifest,
    document_id,
    documents_hash,
    shard_tensors,
    target_rows,
)
from stillhouse.signals.extract import Extract
from stillhouse.signals.labelled import ExtractLabelled, LabelledRows
from stillhouse.signals.sampled_ids import Draw, DrawRows, uniform_numbers
from stillhouse.signals.signal_spec import SignalKind, SignalSpec
from stillhouse.signals.teacher_folder import save_teacher
from stillhouse.tools import cache_folder
from stillhouse.tools.cache_folder import CacheFolder, divide


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
    kind: SignalKind,
    *,
    top_k: int = 64,
    dtype: str | None = None,
    with_label: bool = False,
    packed: bool = False,
    shard_bytes: int | None = None,
) -> Manifest:
    """Write the signals of a run's teacher for its training and held-out documents, or continue to write them.

    top_k: ids per token of "top_k", draws per token of "sampled"; both are at the temperature of the run's objective.
    dtype: of the stored numbers; None: float32, or the teacher's own dtype for hidden states. with_label: "top_k"
    also has the actual next token. packed: ids and counts have as few bits as they need.

    A collective of all processes of a job. Raises ConfigError for a configuration without a teacher, and ValueError
    for a folder in which something else was written, and for a teacher whose signals are not finite.
    """
    if config.teachers is not None:
        raise ConfigError(
            "teachers",
            "a cache has one teacher's signals; expected the section teacher, and a cache for each of them",
        )
    if config.teacher is None or config.teacher.model is None or config.teacher.url is not None:
        raise ConfigError("teacher.model", "is missing: a cache is written by a teacher that is in this job")
    if config.teacher.cross_tokenizer is not None:
        raise ConfigError(
            "teacher.cross_tokenizer",
            f"got {config.teacher.cross_tokenizer}: a cache holds the signals of one tokenizer, expected null",
        )
    ranks, _ = connect_ranks(config)
    data = load_run_data(config, {})
    entries = list(cache_entries(data))
    teacher = load_model("teacher", config.teacher.model, config.teacher, ranks.device)
    if kind == "hidden":
        own = str(teacher.config.dtype).removeprefix("torch.")
        spec = SignalSpec("hidden", dtype or own, with_label=with_label)
    else:
        spec = SignalSpec(kind, dtype or "float32", top_k, config.objective.temperature, with_label)
    width, vocabulary = teacher.config.get_text_config().hidden_size, teacher.vocabulary_rows
    # the size before packing: that is what is in memory while a shard is computed
    rows_per_shard = max(1, (shard_bytes or cache_folder.SHARD_BYTES) // spec.bytes_per_token(width))
    shards = [
        entries[each.start : each.stop] for each in divide([len(each.rows) for each in entries], rows_per_shard)
    ]
    manifest = Manifest(
        spec,
        config.teacher.model,
        model_fingerprints(config, {})["teacher"],
        tokenizer_fingerprint(data.tokenizer),
        vocabulary,
        width,
        len(entries),
        sum(len(each.rows) for each in entries),
        documents_hash((each.id, each.rows) for each in entries),
        len(shards),
        library_versions(),
        packed,
    )
    writer = _Writer(manifest, teacher, config, ranks.device)
    watchdog.enter("writing the cache", timed=False)
    CacheFolder(out, manifest).write(
        lambda folder: save_teacher(folder, teacher, data.tokenizer, with_head=spec.is_exact),
        lambda number: writer.compute(shards[number]),
        ranks,
    )
    return manifest


@dataclass(frozen=True)
class _Writer:
    manifest: Manifest
    teacher: Decoder
    config: RunConfig
    device: torch.device

    @torch.no_grad()
    def compute(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        """The tensors of one shard."""
        offsets = np.concatenate([[0], np.cumsum([len(each.rows) for each in entries])])
        spec, width = self.manifest.signal, self.manifest.width
        tensors = {
            name: torch.zeros(int(offsets[-1]), *shape, dtype=dtype)
            for name, (shape, dtype) in spec.tensors(width).items()
        }
        for documents in dict.fromkeys(id(each.documents) for each in entries):
            chosen = [at for at, each in enumerate(entries) if id(each.documents) == documents]
            self._fill(tensors, [entries[at] for at in chosen], offsets[chosen])
        return shard_tensors(self.manifest.layout, [(each.id, each.rows) for each in entries], tensors)

    def _fill(self, tensors: dict[str, Tensor], entries: Sequence[Entry], starts: np.ndarray) -> None:
        """Run the teacher on documents, and write their rows to `tensors`; the rows of entry n start at starts[n]."""
        documents = entries[0].documents.select([each.number for each in entries])
        longest = int(documents.lengths_D.max())
        sequences = PackedSequences(documents, max_tokens=longest, seed=0, shuffle=False)
        first = torch.tensor([each.rows.start for each in entries])
        stop = torch.tensor([each.rows.stop for each in entries])
        at_a_time = max(1, self.config.train.micro_batch_tokens // longest)
        for start in range(0, len(sequences), at_a_time):
            micro_batch = sequences.micro_batch(range(start, min(start + at_a_time, len(sequences))))
            document_T, position_T = micro_batch.document_T, micro_batch.position_ids_BS.flatten()
            known_T = document_T.clamp(min=0)
            stored_T = (document_T >= 0) & (position_T >= first[known_T]) & (position_T < stop[known_T])
            index_C = stored_T.nonzero()[:, 0]
            inputs = micro_batch.to(self.device).inputs
            processor, context = self._extracting(micro_batch, index_C, entries)
            found = self.teacher(**inputs, processor=processor, context=context)
            into_C = torch.from_numpy(starts)[document_T[index_C]] + position_T[index_C] - first[document_T[index_C]]
            if problem := problem_in(self.manifest.signal, self.manifest.vocabulary, found):
                raise ValueError(
                    f"the teacher's {problem} on {documents.sources[int(document_T[index_C[0]])]} or near it: "
                    "nothing of this shard is written; expected a teacher that can run in this dtype"
                )
            for name, value in found.items():
                tensors[name][into_C] = value

    def _extracting(
        self, micro_batch: MicroBatch, index_C: Tensor, entries: Sequence[Entry]
    ) -> tuple[OutputProcessor, Any]:
        """The output processor of the signal, and its context for these rows of a micro-batch."""
        spec, on_device_C = self.manifest.signal, index_C.to(self.device)
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
            entry, is_own_C = entries[document], document_C == document
            numbers = uniform_numbers(entry.id, entry.rows, spec.top_k)
            uniform_CM[is_own_C] = torch.from_numpy(numbers)[position_C[is_own_C] - entry.rows.start]
        return Draw(spec), DrawRows(on_device_C, uniform_CM)


def cache_entries(data: RunData) -> Iterator[Entry]:
    """Every different document of a run that has a target, once."""
    seen: dict[bytes, range] = {}
    for sequences in (data.train, data.evaluation):
        if sequences is None:
            continue
        documents = sequences.documents
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
