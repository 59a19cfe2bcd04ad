"""Appends lines to a file that stays open, and finds out if they do not arrive there."""

import errno
import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from stillhouse.output.files import UNFINISHED, explained_write_errors, flush


class LineFile:
    """A file of JSON lines, to which this process appends. step: lines of later steps are removed first."""

    def __init__(self, path: Path, step: int):
        self._path = path
        _remove_later(path, step)
        with explained_write_errors(path):
            # unbuffered, so that closing the file does not try again to write what failed
            self._file = path.open("ab", buffering=0)

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        append(self._path, self._file, "".join(json.dumps(each, allow_nan=False) + "\n" for each in records).encode())

    def close(self) -> None:
        self._file.close()


def append(path: Path, file: FileIO, lines: bytes) -> None:
    """Write to an unbuffered file. Raises ValueError if the lines do not fit on the disk, or not to this path."""
    with explained_write_errors(path, len(lines)):
        _require_in_place(path, file)
        if file.write(lines) != len(lines):  # the rest did not fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _require_in_place(path: Path, file: FileIO) -> None:
    """Raise OSError if the path no longer leads to the open file, or if the folder is not writable.

    Without this check, writing would succeed, but into a file that nobody finds at the path any more.
    """
    there, opened = os.stat(path), os.fstat(file.fileno())
    same = (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
    if not same and there.st_size != opened.st_size:  # a FUSE file system may change the inode number
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if not os.access(path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _remove_later(path: Path, step: int) -> None:
    """Remove all lines of later steps, and a last line without an end, by replacing the file.

    Nothing is kept of a run that begins at step 0. Raises ValueError for another line that this class does not write.
    """
    with explained_write_errors(path):
        if step <= 0:
            path.unlink(missing_ok=True)
        if not path.is_file():
            return
        partial = path.with_name(f".{path.name}{UNFINISHED}")
        with path.open("rb") as file, partial.open("wb") as kept:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n") and _step(line, f"{path}:{number}") <= step:
                    kept.write(line)
        if partial.stat().st_size == path.stat().st_size:
            partial.unlink()
            return
        flush(partial)
        os.replace(partial, path)


def _step(line: bytes, where: str) -> int:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        step = None
    if not isinstance(step, int):
        raise ValueError(
            f'{where} is damaged: expected a JSON object with an integer "step"; remove this line, or the whole file,'
            " which only the report reads"
        )
    return step
