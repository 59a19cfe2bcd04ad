"""The folder of a cache that is being written. If the command is interrupted, a new one writes the missing shards.

`cache.json` describes the cache. It is written before the first shard, so that a command for another cache raises an
error. The record of a shard is written after the shard. The index is written last, and readers need it.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from stillhouse.data import tokenizer_fingerprint
from stillhouse.hashing import file_hash
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
from stillhouse.parallel import ONE_PROCESS, Ranks, is_first, process_count, process_rank, wait_for_all
from stillhouse.run.agreement import require_shared_folder
from stillhouse.signals.cache_files import (
    CACHE_KEY,
    INDEX,
    MANIFEST,
    SHARDS,
    TEACHER,
    CacheManifest,
    documents_hash,
    record_name,
    shard_name,
    shard_tensors,
)
from stillhouse.signals.signal_spec import SignalSpec
from stillhouse.signals.teacher_folder import save_teacher

#: the largest size of a shard before packing, unless a single document needs more
SHARD_BYTES = 128 * 2**20


@dataclass(frozen=True)
class _CacheFolder:
    """A folder to which all processes of a job write."""

    path: Path
    manifest: CacheManifest

    def begin(self, save: Callable[[Path, SignalSpec], None]) -> None:
        """Create the folder's files, or check that an existing folder has a part of the same cache.

        save: writes the teacher's files (tokenizer and output head) into a folder.
        """
        self._require_own_folder()
        replace_text(self.path / MANIFEST, self.manifest.to_json())
        with explained_write_errors(self.path):
            (self.path / SHARDS).mkdir(exist_ok=True)
            for path in self.path.rglob(f"*{UNFINISHED}"):
                path.unlink()
            complete = sum(path.stat().st_size for path in (self.path / SHARDS).glob("*.safetensors"))
            missing = self.manifest.rows * self.manifest.signal.bytes_per_token(self.manifest.width) - complete
            require_space(self.path, max(0, missing), ONE_PROCESS)
            save(self.path / TEACHER, self.manifest.signal)

    def write_shard(self, number: int, tensors: dict[str, Tensor]) -> None:
        path = self.path / shard_name(number)
        unfinished = path.with_name(path.name + UNFINISHED)
        with explained_write_errors(path):
            save_file(tensors, unfinished, metadata={CACHE_KEY: f"{self.manifest.identity} {number}"})
            flush(unfinished)
            unfinished.rename(path)
        replace_text(self.path / record_name(number), json.dumps({"sha256": file_hash(path)}))

    def finish(self) -> None:
        """Write the index, after all processes have written their shards."""
        shards = {shard_name(number): self._recorded_hash(number) for number in range(self.manifest.shards)}
        small = [name for name in file_names(self.path) if not name.startswith((SHARDS, INDEX, "."))]
        replace_text(self.path / INDEX, json.dumps({"sha256": {**hashes(self.path, small), **shards}}, indent=1))

    def is_complete(self, number: int) -> bool:
        """Whether a shard has a record and matches the hash in it."""
        if not (self.path / record_name(number)).is_file():
            return False
        return hashes(self.path, [shard_name(number)])[shard_name(number)] == self._recorded_hash(number)

    def _require_own_folder(self) -> None:
        path = self.path / MANIFEST
        if path.is_file():
            existing = CacheManifest.from_json(path.read_text(encoding="utf-8"), path)
            different = [
                f"{name} {theirs!r} there and {ours!r} here"
                for name, theirs, ours in existing.differences(self.manifest)
            ]
            if different:
                raise ValueError(f"{self.path} has another cache: {'; '.join(different)}; expected another folder")
        elif not all(is_leftover(path) for path in self.path.iterdir()):
            raise ValueError(f"{self.path} is not empty and has no cache: expected a new folder")

    def _recorded_hash(self, number: int) -> str:
        path = self.path / record_name(number)
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is missing or damaged ({error}): delete it, and start the command again"
            ) from error


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

    def describe(self, signal: SignalSpec) -> CacheManifest:
        """The manifest of a cache without its documents; `write_documents` adds them."""
        return CacheManifest(
            signal,
            self.name,
            self.identity,
            tokenizer_fingerprint(self.tokenizer),
            self.decoder.vocabulary_rows,
            self.decoder.width,
            versions=library_versions(),
            media=self.media,
            teacher_media=self.teacher_media,
        )

    def save(self, folder: Path, signal: SignalSpec) -> None:
        save_teacher(folder, self.decoder, self.tokenizer, with_head=signal.is_exact)


def write_documents(
    out: Path,
    description: CacheManifest,
    documents: Sequence[tuple[bytes, range]],
    read: Callable[[Sequence[int]], Sequence[dict[str, Tensor]]],
    save: Callable[[Path, SignalSpec], None],
    ranks: Ranks = ONE_PROCESS,
    shard_bytes: int | None = None,
) -> CacheManifest:
    """Write a cache or its missing shards, with one shard in memory at a time. All n processes must call this; each
    writes every n-th shard.

    description: the manifest of the cache; its documents, rows and shards are ignored.
    documents: the id and the rows of each document.
    read: returns the signals of several documents, given by their positions in `documents`.
    save: writes the teacher's files into a folder, for a signal.
    shard_bytes: the largest size of a shard in memory, before packing. None: `SHARD_BYTES`.

    Raises ValueError if the folder contains another cache or other files.
    """
    lengths = [len(rows) for _, rows in documents]
    if not lengths:
        raise ValueError(f"{out}: there are no documents with two tokens or more; nothing is written")
    per_token = description.signal.bytes_per_token(description.width)
    shards = divide(lengths, max(1, (shard_bytes or SHARD_BYTES) // per_token))
    manifest = replace(
        description,
        documents=len(documents),
        rows=sum(lengths),
        documents_hash=documents_hash(documents),
        shards=len(shards),
    )
    folder = _CacheFolder(out, manifest)
    with folder_lock(out) if is_first() else nullcontext():
        if is_first():
            folder.begin(save)
        require_shared_folder(out, ranks)
        share = range(process_rank(), len(shards), process_count())
        missing = [number for number in share if not folder.is_complete(number)]
        for number in tqdm(missing, desc="shards", unit="shard", disable=not is_first() or not missing):
            signals = read(shards[number])
            tensors = {name: torch.cat([signal[name] for signal in signals]) for name in signals[0]}
            stored = [documents[document] for document in shards[number]]
            folder.write_shard(number, shard_tensors(stored, tensors))
        wait_for_all()
        if is_first():
            folder.finish()
    return manifest


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
