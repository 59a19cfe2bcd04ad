"""The encoded files of media, such as images, that documents have in addition to their text.

D documents; I files of all documents, in the order of their placeholders.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow

from stillhouse.data.offsets import chosen_tokens, offsets_of
from stillhouse.data.record import RecordError

#: the maximum number of bytes of an encoded image
MAX_IMAGE_BYTES = 64 * 2**20
_RESTORE = "restore the file, or remove the entry of data.cache that has its path and start again"
_SCHEMA = pyarrow.schema(
    [("path", pyarrow.large_string()), ("sha256", pyarrow.binary(32)), ("data", pyarrow.large_binary())]
)
#: the columns in the order of the fields of `MediaFile`
_NAMES = ("sha256", "path", "data")


@dataclass(frozen=True)
class MediaFile:
    """A file, such as an encoded image.

    sha256: the hash of the bytes when the data was loaded. path: the file's path; None if the bytes are part of the
    record. data: the bytes; None if `read` reads them from the file at each call.
    """

    sha256: bytes
    path: str | None
    data: bytes | None = field(repr=False)

    @classmethod
    def of(cls, data: bytes, path: str | None = None) -> "MediaFile":
        """The file with these bytes. Raises RecordError for more than `MAX_IMAGE_BYTES`."""
        if len(data) > MAX_IMAGE_BYTES:
            raise RecordError(f"has {len(data):,} bytes: expected at most {MAX_IMAGE_BYTES:,}")
        return cls(hashlib.sha256(data).digest(), path, data)

    def as_json(self) -> list[str | None]:
        """The fields as JSON values. The bytes are left out if there is a path."""
        data = None if self.data is None or self.path is not None else base64.b64encode(self.data).decode()
        return [self.sha256.hex(), self.path, data]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Self:
        sha256, path, data = values
        return cls(bytes.fromhex(sha256), path, None if data is None else base64.b64decode(data))

    def read(self) -> bytes:
        """The bytes. Raises ValueError if the file is missing or has changed since the data was loaded."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        problem, cause = "has other bytes than when the data was loaded and tokenized", None
        try:
            data = Path(self.path).read_bytes()
            if hashlib.sha256(data).digest() == self.sha256:
                return data
        except OSError as error:
            problem, cause = f"cannot be read ({error.strerror}), but it could when the data was loaded", error
        raise ValueError(f"{self.path}: the image {problem}: {_RESTORE}") from cause


@dataclass(frozen=True)
class MediaFiles:
    """The media of D documents.

    table: a table with the columns path, sha256 and data; it may be memory-mapped.
    rows_I: int64, the row of each file in the table.
    offsets: [D+1] int64, the files of document d are `offsets[d]:offsets[d+1]`.
    """

    table: pyarrow.Table
    rows_I: np.ndarray
    offsets: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["MediaFiles"]) -> "MediaFiles":
        """The media of several sets of documents."""
        starts = offsets_of([len(part.table) for part in parts])
        return cls(
            pyarrow.concat_tables([part.table for part in parts]),
            np.concatenate([part.rows_I + start for part, start in zip(parts, starts, strict=False)]),
            offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        )

    @classmethod
    def none(cls, documents: int) -> "MediaFiles":
        return cls(_SCHEMA.empty_table(), np.empty(0, dtype=np.int64), np.zeros(documents + 1, dtype=np.int64))

    def select(self, chosen: Sequence[int] | np.ndarray) -> "MediaFiles":
        """The media of the chosen documents, in this order."""
        offsets, index_I = chosen_tokens(self.offsets, chosen)
        return MediaFiles(self.table, self.rows_I[index_I], offsets)

    def of(self, document: int) -> list[MediaFile]:
        """The media of one document."""
        rows = self.rows_I[self.offsets[document] : self.offsets[document + 1]].tolist()
        return [MediaFile(*(self.table.column(name)[row].as_py() for name in _NAMES)) for row in rows]

    def hashes(self) -> bytes:
        """The hashes of all media in the order of the documents."""
        return b"".join(self.table.column("sha256")[int(row)].as_py() for row in self.rows_I)


class MediaWriter:
    """Writes media to an Arrow file, or to memory if `path` is None."""

    def __init__(self, path: Path | None):
        self.path = path
        self._sink = pyarrow.BufferOutputStream() if path is None else pyarrow.OSFile(str(path), "wb")
        self._writer = pyarrow.ipc.new_file(self._sink, _SCHEMA)
        self.counts: list[int] = []  # the number of files of each document
        self._closed = False

    def add(self, files: Sequence[MediaFile]) -> None:
        """Write the media of the next document."""
        self.counts.append(len(files))
        if files:
            # bytes that are in a file are not written
            rows = [
                {"path": file.path, "sha256": file.sha256, "data": file.data if file.path is None else None}
                for file in files
            ]
            self._writer.write_batch(pyarrow.RecordBatch.from_pylist(rows, schema=_SCHEMA))

    def finish(self) -> MediaFiles:
        """Complete the file, and return all media, which are then read from it."""
        self.close()
        source = pyarrow.BufferReader(self._sink.getvalue()) if self.path is None else self.path
        return MediaFiles(media_table(source), np.arange(sum(self.counts)), offsets_of(self.counts))

    def close(self) -> None:
        """Complete the file. A second call does nothing."""
        if not self._closed:
            self._writer.close()
            if self.path is not None:
                self._sink.close()
        self._closed = True


def media_table(source: Path | pyarrow.BufferReader) -> pyarrow.Table:
    """The table of an Arrow file of media. A file on disk is memory-mapped."""
    file = pyarrow.memory_map(str(source)) if isinstance(source, Path) else source
    return pyarrow.ipc.open_file(file).read_all()
