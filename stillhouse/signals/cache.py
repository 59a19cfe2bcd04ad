"""Opens a cache, checks that it is complete, and reads the rows of single documents.

The description, the teacher's files and the shards are compared with the hashes in the index. A shard is hashed when
its first row is read.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

from safetensors import safe_open
from torch import Tensor

from stillhouse.data import Documents
from stillhouse.data.media import MEDIA, MEDIUM, MediaInputs
from stillhouse.hashing import file_hash
from stillhouse.libraries import reading
from stillhouse.signals.cache_files import (
    CACHE_KEY,
    ID_BYTES,
    INDEX,
    MANIFEST,
    TEACHER,
    CacheManifest,
    StoredDocument,
    document_id,
    documents_hash,
    read_rows,
    shard_name,
    target_rows,
)
from stillhouse.signals.signal_spec import DocumentRows, problem_in
from stillhouse.signals.signal_store import SignalStore

_DAMAGED = "is damaged: write the cache again"


class SignalCache(SignalStore):
    """An opened cache. Raises ValueError with a file's name unless the cache is complete and unchanged."""

    teacher_folder: Path

    def __init__(self, folder: Path):
        self.folder, self.name, self.teacher_folder = folder, str(folder), folder / TEACHER
        self.hashes = _index(folder)
        # added files are refused, too, because a file such as an index can change which files are read
        present = {f"{TEACHER}/{path.name}" for path in self.teacher_folder.glob("*")}
        for name in sorted({MANIFEST} | present | {name for name in self.hashes if name.startswith(f"{TEACHER}/")}):
            self._require_unchanged(name)
        self.manifest = CacheManifest.from_json((folder / MANIFEST).read_text(encoding="utf-8"), folder / MANIFEST)
        self.signal, self.width, self.identity = self.manifest.signal, self.manifest.width, self.manifest.identity
        self.vocabulary = self.manifest.vocabulary
        self._verified, self._lock = set[int](), Lock()
        self._files: list[Any] = []
        self.documents: dict[bytes, StoredDocument] = {}
        for number in range(self.manifest.shards):
            self._open(number)
        digest = documents_hash((document, stored.rows) for document, stored in self.documents.items())
        if digest != self.manifest.documents_hash:
            raise ValueError(f"{folder}: a shard's table of documents was changed: write the cache again")

    def require(self, documents: Documents, what: str, media_inputs: MediaInputs | None = None) -> None:
        """Raise ValueError unless the cache has every row of these documents that predicts a target."""
        if documents.has_media:
            assert media_inputs is not None
            if self.manifest.media != media_inputs.processor.pixels_identity:
                has = f"was written with other pixels of {MEDIA}" if self.manifest.media else "is a cache of texts"
                raise ValueError(
                    f"{self.folder} {has}, and {what} has {MEDIA}: expected a cache of this data, written with the "
                    f"same settings of the student's processor of {MEDIA} and the same data.image_pixels"
                )
        missing: dict[int, StoredDocument | None] = {}
        for number in range(len(documents)):
            media = None if media_inputs is None else media_inputs.of(documents, number)
            stored = self.documents.get(document_id(documents.tokens(number), media))
            if stored is None or not stored.has(target_rows(documents.targets(number))):
                missing[number] = stored
        if missing:
            why = "some of its rows are missing; was the cache written for other target tokens?"
            if next(iter(missing.values())) is None:
                asks = f"; was {MEDIUM} changed after the cache was written?" if documents.has_media else ""
                why = f"it is absent{asks}"
            raise ValueError(
                f"{self.folder} lacks {len(missing):,} of the {len(documents):,} documents of {what}; the first is "
                f"{documents.sources[next(iter(missing))]} ({why}); expected a cache of this data, with the same "
                "tokenizer, template and longest document"
            )

    def read(self, wanted: Sequence[DocumentRows]) -> list[dict[str, Tensor]]:
        return [self.read_document(document_id(request.tokens, request.media), request.rows) for request in wanted]

    def close(self) -> None:
        self._files.clear()

    def verify(self) -> None:
        """Compare every shard with its hash, and check the rows of all documents. Raises ValueError for a problem."""
        for number in range(self.manifest.shards):
            self._verify(number)
        for document, stored in self.documents.items():
            self.read_document(document, stored.rows)

    def read_document(self, document: bytes, rows: range) -> dict[str, Tensor]:
        """Return the signal of some rows of the document with this id.

        Raises ValueError if the cache lacks a row, if a shard has changed, or if `problem_in` finds a problem.
        """
        stored = self.documents.get(document)
        if stored is None or not stored.has(rows):
            raise ValueError(
                f"{self.folder} has no rows {rows.start} to {rows.stop - 1} of document {document.hex()}"
            )
        self._verify(stored.shard)
        path = self.folder / shard_name(stored.shard)
        with reading(f"{path} {_DAMAGED}"):
            tensors = read_rows(self.manifest, self._files[stored.shard], stored, rows)
        if problem := problem_in(self.signal, self.manifest.vocabulary, tensors):
            raise ValueError(f"{path}: {problem}: write the cache again")
        return tensors

    def _present(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing: the cache is incomplete")
        return path

    def _open(self, number: int) -> None:
        """Open a shard, and read its table of documents."""
        path = self._present(shard_name(number))
        with reading(f"{path} {_DAMAGED}"):
            file = safe_open(path, framework="pt")
            identity = (file.metadata() or {}).get(CACHE_KEY)
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (file is no dict)
            forms = {name: (tuple(part.get_shape()), part[:0].dtype) for name, part in slices.items()}
        if identity != f"{self.manifest.identity} {number}":
            raise ValueError(f"{path} is not shard {number} of this cache: write the cache again")
        for name, (shape, dtype) in self.manifest.forms.items():
            actual, stored_dtype = forms.get(name, ((), "absent"))
            if (actual[1:], stored_dtype) != (shape, dtype):
                raise ValueError(
                    f"{path}: '{name}' is {stored_dtype} of shape {actual}: expected [rows, *{shape}] of {dtype}"
                )
        with reading(f"{path} {_DAMAGED}"):
            ids, first, offsets = (file.get_tensor(name) for name in ("document", "first_row", "offsets"))
        raw, starts, borders = ids.numpy().tobytes(), first.tolist(), offsets.tolist()
        documents = len(raw) // ID_BYTES
        if (len(starts), len(borders)) != (documents, documents + 1) or borders != sorted(borders) or borders[0] != 0:
            raise ValueError(f"{path} is damaged: its table of documents has gaps")
        for at, (start, (first_row, stop_row)) in enumerate(zip(starts, pairwise(borders), strict=True)):
            rows = range(start, start + stop_row - first_row)
            self.documents[raw[at * ID_BYTES : (at + 1) * ID_BYTES]] = StoredDocument(number, at, first_row, rows)
        self._files.append(file)

    def _verify(self, number: int) -> None:
        with self._lock:
            if number not in self._verified:
                self._require_unchanged(shard_name(number))
                self._verified.add(number)

    def _require_unchanged(self, name: str) -> None:
        path = self._present(name)
        if file_hash(path) != self.hashes.get(name):
            raise ValueError(f"{path} was changed or added after the cache was written: write the cache again")


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        unfinished = (folder / MANIFEST).is_file()
        what = "is an unfinished cache, which the same command continues" if unfinished else "is not a cache"
        raise ValueError(f"{folder} {what}; expected a folder that `stillhouse cache` has written")
    try:
        hashes = json.loads(path.read_text(encoding="utf-8"))["sha256"]
        return {str(name): str(digest) for name, digest in hashes.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: write the cache again ({error})") from error
