"""Appends lines to a file that stays open, and finds out if they do not arrive there."""

import errno
import os
from io import FileIO
from pathlib import Path

from stillhouse.train.files import explained_write_errors


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
