"""Refuses what has the name of a file and is none. Whoever opens a pipe waits until somebody writes to it."""

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def require_regular(path: Path) -> None:
    """Raise ValueError unless the path is a regular file or a link to one. Nothing is opened."""
    if (kind := kind_of(path)) is not None:
        raise ValueError(f"{path} is {kind}: expected a regular file")


def kind_of(path: Path) -> str | None:
    """What a path is in words, such as "a socket"; None for a regular file and for a link to one."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not path.is_symlink():
            raise
        return f"a link to {os.readlink(path)}, which cannot be followed ({error.strerror})"
    if stat.S_ISREG(mode):
        return None
    return ("a link to " if path.is_symlink() else "") + _KINDS.get(stat.S_IFMT(mode), "no file")
