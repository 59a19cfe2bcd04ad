"""Writes a cache of teacher signals: the command `stillhouse cache`.

The documents are divided into shards once, by their order and size alone. Each process computes every n-th shard.
A shard is complete when its record exists; a command that is started again computes only the missing ones. The folder
says what is being written (`cache.json`) before the first shard, so that another command cannot continue it.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import Documents, PackedSequences, tokenizer_fingerprint
from stillhouse.models import Decoder
from stillhouse.parallel import is_first, process_count, process_rank, wait_for_all, watchdog
from stillhouse.teachers.cache.format import (
    CACHE_KEY,
    INDEX,
    MANIFEST,
    SHARDS,
    TEACHER,
    Manifest,
    document_id,
    documents_hash,
    record_name,
    shard_identity,
    shard_name,
    target_rows,
)
from stillhouse.teachers.extract import Extract
from stillhouse.teachers.spec import SignalKind, SignalSpec
from stillhouse.teachers.teacher_folder import save_teacher
from stillhouse.train.agreement import library_versions, require_shared_folder
from stillhouse.train.build import load_teacher, model_fingerprints
from stillhouse.train.files import (
    UNFINISHED,
    explained_write_errors,
    file_names,
    flush,
    hashes,
    replace_text,
    require_space,
)
from stillhouse.train.folder import LOCK, folder_lock
from stillhouse.train.inputs import RunData, load_run_data
from stillhouse.train.session import connect_ranks

#: the size of a shard, unless a single document needs more
SHARD_BYTES = 128 * 2**20


@dataclass(frozen=True)
class Entry:
    """A document to be written: where it is, and which of its rows."""

    documents: Documents
    number: int
    rows: range


def write_cache(
    config: RunConfig,
    out: Path,
    kind: SignalKind,
    *,
    top_k: int = 64,
    dtype: str | None = None,
    shard_bytes: int | None = None,
) -> Manifest:
    """Write the signals of a run's teacher for its training and held-out documents, or continue to write them.

    top_k: ids per token of "top_k"; their log-probabilities are at the temperature of the run's objective. dtype: of
    the stored numbers; None: float32, or the teacher's own dtype for hidden states.

    A collective of all processes of a job. Raises ConfigError for a configuration without a teacher, and ValueError
    for a folder in which something else was written, and for a teacher whose signals are not finite.
    """
    if config.teacher is None or config.teacher.model is None or config.teacher.url is not None:
        raise ConfigError("teacher.model", "is missing: a cache is written by a teacher that is in this job")
    device, _ = connect_ranks(config)
    data = load_run_data(config)
    entries = list(_entries(data))
    teacher = load_teacher(config, device)
    if kind == "top_k":
        spec = SignalSpec("top_k", dtype or "float32", top_k, config.objective.temperature)
    else:
        spec = SignalSpec("hidden", dtype or str(teacher.config.dtype).removeprefix("torch."))
    width = teacher.config.get_text_config().hidden_size
    shards = _divide(entries, max(1, (shard_bytes or SHARD_BYTES) // spec.bytes_per_token(width)))
    manifest = Manifest(
        spec,
        config.teacher.model,
        model_fingerprints(config)["teacher"],
        tokenizer_fingerprint(data.tokenizer),
        teacher.vocabulary_rows,
        width,
        len(entries),
        sum(len(each.rows) for each in entries),
        documents_hash((document_id(each.documents.tokens(each.number)), each.rows) for each in entries),
        len(shards),
        library_versions(),
    )
    writer = _Writer(out, manifest, teacher, config, device)
    with folder_lock(out) if is_first() else nullcontext():
        watchdog.enter("writing the cache", timed=False)
        writer.begin(data.tokenizer)
        writer.write(shards)
        writer.finish()
    return manifest


@dataclass(frozen=True)
class _Writer:
    out: Path
    manifest: Manifest
    teacher: Decoder
    config: RunConfig
    device: torch.device

    def begin(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Create the folder, or check that an existing one has a part of the same cache."""
        if is_first():
            self._require_own_folder()
            replace_text(self.out / MANIFEST, self.manifest.to_json())
            with explained_write_errors(self.out):
                (self.out / SHARDS).mkdir(exist_ok=True)
                for path in self.out.rglob(f"*{UNFINISHED}"):
                    path.unlink()
                require_space(self.out, self._missing_bytes(), None)
                with_head = self.manifest.signal.kind == "hidden"
                save_teacher(self.out / TEACHER, self.teacher, tokenizer, with_head=with_head)
        require_shared_folder(self.out, self.device)

    def write(self, shards: Sequence[Sequence[Entry]]) -> None:
        """Compute this process's shards that are not complete yet."""
        rank, processes = process_rank(), process_count()
        own = [number for number in range(rank, len(shards), processes) if not self._is_complete(number)]
        for number in tqdm(own, desc="shards", unit="shard", disable=not is_first() or not own):
            tensors = self._compute(shards[number])
            path = self.out / shard_name(number)
            partial = path.with_name(path.name + UNFINISHED)
            with explained_write_errors(path):
                save_file(tensors, partial, metadata={CACHE_KEY: shard_identity(self.manifest, number)})
                flush(partial)
                partial.rename(path)
            record = {"sha256": hashes(self.out, [shard_name(number)])[shard_name(number)]}
            replace_text(self.out / record_name(number), json.dumps(record))

    def finish(self) -> None:
        """Write the index, after all processes have written their shards."""
        wait_for_all()
        if not is_first():
            return
        written = {name: digest for number in range(self.manifest.shards) for name, digest in self._record(number)}
        small = [name for name in file_names(self.out) if not name.startswith((SHARDS, INDEX, "."))]
        replace_text(self.out / INDEX, json.dumps({"sha256": {**hashes(self.out, small), **written}}, indent=1))

    def _require_own_folder(self) -> None:
        path = self.out / MANIFEST
        if path.is_file():
            found = Manifest.from_json(path.read_text(encoding="utf-8"), path)
            different = [
                f"{name} {theirs!r} there and {ours!r} here"
                for name, theirs, ours in found.differences(self.manifest)
            ]
            if different:
                raise ValueError(f"{self.out} has another cache: {'; '.join(different)}; expected another folder")
        elif any(each.name != LOCK and not each.name.endswith(UNFINISHED) for each in self.out.iterdir()):
            raise ValueError(f"{self.out} is not empty and has no cache: expected a new folder")

    def _missing_bytes(self) -> int:
        per_token = self.manifest.signal.bytes_per_token(self.manifest.width)
        held = sum(path.stat().st_size for path in (self.out / SHARDS).glob("*.safetensors"))
        return max(0, self.manifest.rows * per_token - held)

    def _is_complete(self, number: int) -> bool:
        """Whether a shard has the hash of its record, which is written after the shard."""
        if not (self.out / record_name(number)).is_file():
            return False
        return dict(self._record(number)) == hashes(self.out, [shard_name(number)])

    def _record(self, number: int) -> Iterator[tuple[str, str]]:
        path = self.out / record_name(number)
        try:
            yield shard_name(number), str(json.loads(path.read_text(encoding="utf-8"))["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}): delete it, and start the command again"
            ) from error

    @torch.no_grad()
    def _compute(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
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
        ids = b"".join(document_id(each.documents.tokens(each.number)) for each in entries)
        return {
            "document": torch.frombuffer(bytearray(ids), dtype=torch.uint8).view(len(entries), -1),
            "first_row": torch.tensor([each.rows.start for each in entries], dtype=torch.int32),
            "offsets": torch.from_numpy(offsets.astype(np.int64)),
            **tensors,
        }

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
            found = self.teacher(**inputs, processor=Extract(self.manifest.signal), context=index_C.to(self.device))
            into_C = torch.from_numpy(starts)[document_T[index_C]] + position_T[index_C] - first[document_T[index_C]]
            for name, value in found.items():
                if value.isnan().any() or (name == "hidden" and value.isinf().any()):
                    raise ValueError(
                        f"the teacher's {name} are not finite on {documents.sources[int(document_T[index_C[0]])]} or "
                        "near it: nothing of this shard is written; expected a teacher that can run in this dtype"
                    )
                tensors[name][into_C] = value


def _entries(data: RunData) -> Iterator[Entry]:
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


def _divide(entries: Sequence[Entry], rows: int) -> list[list[Entry]]:
    """Divide documents into shards of at most `rows` rows, or of one document that has more. No shard is empty."""
    shards: list[list[Entry]] = []
    held = rows + 1
    for entry in entries:
        if held + len(entry.rows) > rows:
            shards.append([])
            held = 0
        shards[-1].append(entry)
        held += len(entry.rows)
    return shards
