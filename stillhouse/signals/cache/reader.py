"""Opens a cache, checks that it is complete, and reads the rows of single documents.

Nothing of a cache is trusted: the description, the index and every shard are compared with the hashes that were
written last. The content of a shard is hashed when its first row is read, since a cache may be larger than memory.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from stillhouse.data import Documents
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading
from stillhouse.signals.cache.files import (
    CACHE_KEY,
    ID_BYTES,
    INDEX,
    MANIFEST,
    TEACHER,
    Manifest,
    document_id,
    documents_hash,
    shard_identity,
    shard_name,
    target_rows,
)
from stillhouse.signals.cache.shard_layout import StoredRows
from stillhouse.signals.signal_checks import problem_in
from stillhouse.signals.signal_spec import DocumentRows
from stillhouse.signals.stored import SignalStore


@dataclass(frozen=True)
class Stored:
    """Where a document is stored.

    shard: the shard's number
    rows: the rows of the document that are stored
    start: the row of the shard at which they begin
    number: of the document in the shard
    """

    shard: int
    rows: range
    start: int
    number: int


class SignalCache(SignalStore):
    """An opened cache.

    Raises ValueError, naming the file, for a folder that is not a complete cache, and for a file that is missing,
    truncated, of another cache or changed since it was written.
    """

    #: the teacher's configuration and tokenizer, and with hidden states its output head
    teacher_folder: Path

    def __init__(self, folder: Path):
        self.folder, self.name = folder, str(folder)
        self.teacher_folder = folder / TEACHER
        self.hashes = _index(folder)
        self.manifest = Manifest.from_json(self._checked(MANIFEST).decode(), folder / MANIFEST)
        self.signal, self.width, self.identity = self.manifest.signal, self.manifest.width, self.manifest.identity
        self._layout = self.manifest.layout
        # files that were added count, too: a model folder's weights are found by their names' ending
        present = {f"{TEACHER}/{path.name}" for path in self.teacher_folder.glob("*")}
        for name in sorted(present | {name for name in self.hashes if name.startswith(f"{TEACHER}/")}):
            self._checked(name)
        self._files: list[Any] = [self._open(number) for number in range(self.manifest.shards)]
        self._verified: set[int] = set()
        self._lock = Lock()
        self._documents = {
            document: where
            for number, file in enumerate(self._files)
            for document, where in self._table(number, file)
        }
        digest = documents_hash((document, stored.rows) for document, stored in self._documents.items())
        if digest != self.manifest.documents_hash:
            raise ValueError(f"{folder}: a shard's table of documents was changed: write the cache again")

    def require(self, documents: Documents, what: str) -> None:
        """Raise ValueError unless the cache has every row of these documents that predicts a target.

        what: the documents' name in the error message
        """
        missing = [number for number in range(len(documents)) if not self._covers(documents, number)]
        if missing:
            known = document_id(documents.tokens(missing[0])) in self._documents
            why = "rows of it are missing; was it written for other target tokens?" if known else "it is absent"
            raise ValueError(
                f"{self.folder} lacks {len(missing):,} of the {len(documents):,} documents of {what}, the first is "
                f"{documents.sources[missing[0]]} ({why}); expected a cache of this data, with the same tokenizer, "
                "template and longest document"
            )

    def read(self, wanted: Sequence[DocumentRows]) -> list[dict[str, Tensor]]:
        """The tensors of `SignalSpec.tensors` of each document.

        Raises ValueError for rows that the cache lacks, for a shard whose content has changed, and for numbers that
        no teacher can give (`problem_in`).
        """
        return [self.read_document(document_id(request.tokens), request.rows) for request in wanted]

    def documents(self) -> Mapping[bytes, range]:
        """The id and the stored rows of every document, in the cache's order."""
        return {document: stored.rows for document, stored in self._documents.items()}

    def close(self) -> None:
        self._files.clear()

    def verify(self) -> None:
        """Compare every shard with its hash, and check all of its rows. Raises ValueError for the first problem."""
        for number in range(self.manifest.shards):
            self._verify(number)
        for document, stored in self._documents.items():
            self.read_document(document, stored.rows)

    def read_document(self, document: bytes, rows: range) -> dict[str, Tensor]:
        """`read` for one document, by its id."""
        stored = self._documents.get(document)
        if stored is None or rows.start < stored.rows.start or rows.stop > stored.rows.stop:
            raise ValueError(
                f"{self.folder} has no rows {rows.start} to {rows.stop - 1} of document {document.hex()}"
            )
        self._verify(stored.shard)
        path, first = self.folder / shard_name(stored.shard), stored.rows.start
        part = StoredRows(stored.number, stored.start, range(rows.start - first, rows.stop - first))
        with reading(f"{path} is damaged: write the cache again"):
            tensors = self._layout.read(self._files[stored.shard], part)
        if problem := problem_in(self.signal, self.manifest.vocabulary, tensors):
            raise ValueError(f"{path}: {problem}: write the cache again")
        return tensors

    def _covers(self, documents: Documents, number: int) -> bool:
        rows = target_rows(documents.targets(number))
        stored = self._documents.get(document_id(documents.tokens(number)))
        return stored is not None and stored.rows.start <= rows.start and rows.stop <= stored.rows.stop

    def _checked(self, name: str) -> bytes:
        """The content of a file of the cache."""
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: the cache is not whole")
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != self.hashes.get(name):
            raise ValueError(f"{path} was changed or added after the cache was written: write the cache again")
        return content

    def _open(self, number: int) -> Any:
        path = self.folder / shard_name(number)
        if not path.is_file():
            raise ValueError(f"{path} is missing: the cache is not whole")
        with reading(f"{path} is damaged: write the cache again"):
            file = safe_open(path, framework="pt")
            identity = (file.metadata() or {}).get(CACHE_KEY)
            shapes = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in _slices(file)}
        if identity != shard_identity(self.manifest, number):
            raise ValueError(f"{path} is not shard {number} of this cache: write the cache again")
        for name, (shape, dtype) in self._layout.forms().items():
            actual, code = shapes.get(name, ((), "absent"))
            if (actual[1:], code) != (shape, _CODES[dtype]):
                raise ValueError(
                    f"{path}: '{name}' is {code} of shape {actual}: expected [rows, *{shape}] of {dtype}"
                )
        return file

    def _table(self, number: int, file: Any) -> list[tuple[bytes, Stored]]:
        with reading(f"{self.folder / shard_name(number)} is damaged: write the cache again"):
            ids, first, offsets = (file.get_tensor(name) for name in ("document", "first_row", "offsets"))
        raw, starts, borders = ids.numpy().tobytes(), first.tolist(), offsets.tolist()
        documents = len(raw) // ID_BYTES
        if (len(starts), len(borders)) != (documents, documents + 1) or borders != sorted(borders) or borders[0] != 0:
            raise ValueError(f"{self.folder / shard_name(number)} is damaged: its table of documents has gaps")
        return [
            (
                raw[at * ID_BYTES : (at + 1) * ID_BYTES],
                Stored(number, range(starts[at], starts[at] + borders[at + 1] - borders[at]), borders[at], at),
            )
            for at in range(len(starts))
        ]

    def _verify(self, number: int) -> None:
        """Compare a shard's content with its hash, once."""
        with self._lock:
            if number in self._verified:
                return
            path = self.folder / shard_name(number)
            if file_hash(path) != self.hashes.get(shard_name(number)):
                raise ValueError(f"{path} was changed after the cache was written: write the cache again")
            self._verified.add(number)


#: names of dtypes in safetensors files
_CODES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def _slices(file: Any) -> list[tuple[str, Any]]:
    return [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 (a safetensors file is no dict)


def _index(folder: Path) -> dict[str, str]:
    """The hash of every file of a cache."""
    path = folder / INDEX
    if not path.is_file():
        unfinished = (folder / MANIFEST).is_file()
        what = "is unfinished: the command that wrote it continues it" if unfinished else "is not a cache"
        raise ValueError(f"{folder} {what}; expected a folder that `stillhouse cache` has written")
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        return {str(name): str(digest) for name, digest in hashes.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: write the cache again ({error})") from error
