"""Opens data files, and decompresses gzip (`.gz`) and Zstandard (`.zst`). Only regular files are opened, because
opening a named pipe waits until another process writes to it, and reading a device may never end. The readers are in
`text_readers.py` and `arrow_readers.py`.
"""

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol, cast

from stillhouse.data.record import Record

COMPRESSED = (".gz", ".zst")
#: the capability of a reader that uses `open_bytes`: a suffix of `COMPRESSED` may follow the names of its files
DECOMPRESSES = f"also {' and '.join(COMPRESSED)}"
#: the capability of a reader whose files give all objects of a column the same keys. `read` then also gets the names
#: of the columns with messages or tools, and removes the keys with null from them
DROPS_NULL = "no null keys in messages"
#: the maximum number of bytes of a line of JSON or CSV, and of a field of CSV
MAX_BYTES = 32 * 2**20
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class Reader(Protocol):
    """Reads files with one suffix, such as jsonl. The suffix names its entry point in `stillhouse.readers`."""

    capabilities: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """The records of a file. An unreadable record has a `problem`. Raises ValueError for a damaged file."""
        ...


def require_regular(paths: list[Path]) -> list[Path]:
    """Return the paths. Raises ValueError unless all are regular files or links to regular files. Opens no file."""
    for path in paths:
        if (kind := kind_of(path)) is not None:
            raise ValueError(f"{path} is {kind}: expected a regular file")
    return paths


def kind_of(path: Path) -> str | None:
    """The type of a path that is not a regular file, such as "a socket"; None for a regular file or a link to one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not path.is_symlink():
            raise
        return f"a link to {os.readlink(path)}, which cannot be followed ({error.strerror})"
    if stat.S_ISREG(mode):
        return None
    return ("a link to " if path.is_symlink() else "") + _KINDS.get(stat.S_IFMT(mode), "no file")


def format_of(path: Path) -> str:
    """A file's suffix without the suffix of a compression: ".jsonl" for a.jsonl and for a.jsonl.zst."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's content, decompressed while it is read.

    Raises ValueError, also within the block, if the compressed data are damaged or end too early.
    """
    if path.suffix not in COMPRESSED:
        with path.open("rb") as plain:
            yield plain
        return
    what = "gzip" if path.suffix == ".gz" else "Zstandard"
    if not path.stat().st_size:  # the libraries would accept an empty file as an empty text
        raise ValueError(f"{path}: the file is empty; expected {what} data")
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                yield cast(BinaryIO, file)
        else:
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
            with io.BufferedReader(stream, 2**20) as buffered:
                yield buffered
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path}: the {what} data are damaged or cut off ({error}): copy the complete file again"
        ) from error
