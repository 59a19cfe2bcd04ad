"""Opens files that may be compressed with gzip (`.gz`) or Zstandard (`.zst`), and detects damaged ones."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

COMPRESSED = (".gz", ".zst")


def format_of(path: Path) -> str:
    """The suffix that names the format of the content: ".jsonl" for a.jsonl and a.jsonl.zst."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """The file's content, decompressed while it is read.

    Raises ValueError, also within the block, if the compressed data are damaged or end too early.
    """
    if path.suffix not in COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    what = "gzip" if path.suffix == ".gz" else "Zstandard"
    if not path.stat().st_size:  # the libraries take no bytes for an empty text
        raise ValueError(f"{path}: the file is empty; expected {what} data")
    try:
        with _decompressed(path) as file:
            yield cast(BinaryIO, file)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path}: the {what} data are damaged or cut off ({error}); expected the complete file, copy it again"
        ) from error


def _decompressed(path: Path) -> BinaryIO | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"), 2**20)
