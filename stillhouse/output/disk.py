"""Writes files and folders atomically, and explains disk errors."""

import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from stillhouse.hashing import file_hash

if TYPE_CHECKING:
    from stillhouse.parallel import Ranks

UNFINISHED = ".partial"


def replace_text(path: Path, content: str) -> None:
    """Write a file under a temporary name and rename it, so that a reader never sees an incomplete file."""
    partial = path.with_name(f".{path.name}{UNFINISHED}")
    with explained_write_errors(path):
        partial.write_bytes(content.encode())
        flush(partial)
        os.replace(partial, path)


@contextmanager
def atomic_folder(final: Path, needed_bytes: int | None = None, *, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to write to; if the block ends without an error, flush it and rename it to `final`.

    needed_bytes: the number of bytes to write, if known, for the error message about a full disk.
    exclusive: whether `final` is outside a run's folder. If so, an existing temporary folder raises ValueError,
        because it may belong to another process. If the block fails, the new temporary folder is removed.
    """
    partial = final.with_name(final.name + UNFINISHED)
    with ExitStack() as stack, explained_write_errors(final, needed_bytes):
        if partial.exists() and not exclusive:
            shutil.rmtree(partial)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.mkdir()
        except FileExistsError as error:
            raise ValueError(
                f"{partial} exists: another process is writing to it or was killed, or it has another purpose; "
                "remove this folder, or choose another name"
            ) from error
        if exclusive:
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            flush(path)
        if final.exists() and not exclusive:
            shutil.rmtree(final)
        os.rename(partial, final)
        flush(final.parent)


@contextmanager
def written_together(final: Path, ranks: "Ranks", needed_bytes: int | None = None) -> Iterator[Path]:
    """`atomic_folder` for all ranks: rank 0 creates the folder, and renames it after all ranks are done."""
    partial = final.with_name(final.name + UNFINISHED)
    first = atomic_folder(final, needed_bytes) if ranks.is_first else nullcontext()
    with explained_write_errors(final, needed_bytes), first:
        ranks.barrier()
        yield partial
        ranks.barrier()
    ranks.barrier()


@contextmanager
def explained_write_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """If writing fails in the block, raise ValueError with the path and, if the disk is full, the free space.

    needed_bytes: the number of bytes to write, if known. For a full disk, safetensors raises SafetensorError, and DCP
    raises CheckpointException, which is no subclass of `Exception`.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _explained(path, error, needed_bytes) from error
    except CheckpointException as failure:
        first = next(iter(failure.failures.values()))[0]
        if not isinstance(first, OSError | SafetensorError):
            raise
        raise _explained(path, first, needed_bytes) from first


def require_space(path: Path, needed_bytes: int, ranks: "Ranks") -> None:
    """Raise ValueError on all ranks if the disk of `path` has fewer than `needed_bytes` free bytes."""
    free = ranks.from_first(_free_bytes(path) if ranks.is_first else 0)
    if free < needed_bytes:
        raise ValueError(_no_space(path, needed_bytes, free))


def hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of each of these files in a folder; "" for a file that does not exist."""
    return {name: file_hash(folder / name) if (folder / name).is_file() else "" for name in names}


def file_names(folder: Path) -> list[str]:
    """The relative paths of all files below a folder, with forward slashes, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _explained(path: Path, error: Exception, needed_bytes: int | None) -> Exception:
    """Convert the error to a ValueError with the path. Return an error about another path unchanged."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
        return ValueError(_no_space(path, needed_bytes, _free_bytes(path)))
    other_path = isinstance(error, OSError) and error.filename and path.parent not in Path(error.filename).parents
    if number is not None and not other_path:
        return ValueError(f"{path} cannot be written: {os.strerror(number)}; {_AFTERWARDS}")
    return error


def _no_space(path: Path, needed_bytes: int | None, free_bytes: int) -> str:
    needed = "" if needed_bytes is None else f" and {needed_bytes:,} bytes are needed"
    return f"{path} cannot be written: {free_bytes:,} bytes are free on its disk{needed}; {_AFTERWARDS}"


_AFTERWARDS = "all complete files are intact, and the same command continues from them when the problem is solved"


def _free_bytes(path: Path) -> int:
    # the path may not exist yet, and some disks report no total size
    usage = shutil.disk_usage(next(parent for parent in [path, *path.parents] if parent.exists()))
    return usage.free if usage.total else sys.maxsize


def flush(path: Path) -> None:
    """Write the operating system's cached data of a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
