"""Files and folders that appear whole or not at all, and what is said when the disk does not take them."""

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from stillhouse.parallel import Mesh, gathered, is_first

UNFINISHED = ".partial"


def replace_text(path: Path, content: str) -> None:
    """Write a file beside its place and rename it, so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}{UNFINISHED}")
    with explained_write_errors(path):
        partial.write_text(content, encoding="utf-8")
        _flush(partial)
        os.replace(partial, path)


@contextmanager
def atomic_folder(final: Path, needed_bytes: int | None = None) -> Iterator[Path]:
    """A folder to write to that takes its name when the block ends without an error, after all of it is on disk.

    needed_bytes: what will be written, where that is known, for the error of a full disk.
    """
    partial = _partial(final)
    with explained_write_errors(final, needed_bytes):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if final.exists():
            shutil.rmtree(final)
        os.rename(partial, final)
        _flush(final.parent)


@contextmanager
def written_together(final: Path, mesh: Mesh | None, needed_bytes: int | None = None) -> Iterator[Path]:
    """`atomic_folder` for all ranks: rank 0 creates the folder and renames it after the others are done."""
    if mesh is None:
        with atomic_folder(final, needed_bytes) as partial:
            yield partial
        return
    first = atomic_folder(final, needed_bytes) if is_first() else nullcontext(_partial(final))
    with explained_write_errors(final, needed_bytes), first as partial:
        dist.barrier(mesh.everyone)
        yield partial
        dist.barrier(mesh.everyone)
    dist.barrier(mesh.everyone)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed, or had no space left, did not finish writing."""
    for path in folder.glob(f"*{UNFINISHED}"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def explained_write_errors(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Raise ValueError, with the path and the space on its disk, where writing in the block fails.

    needed_bytes: what is about to be written, where that is known. The libraries that write tensors report a full
    disk each in their own way; DCP's exception is not even an `Exception`.
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


def require_space(path: Path, needed_bytes: int, mesh: Mesh | None) -> None:
    """Raise ValueError on all ranks where the disk of `path` has less space than that. Nothing is written."""
    free = everywhere(_free_bytes(path) if is_first() else 0, mesh)[0]
    if free < needed_bytes:
        raise ValueError(_no_space(path, needed_bytes, free))


def everywhere(value: Any, mesh: Mesh | None) -> list[Any]:
    """What every rank gives, in their order; anything that JSON can hold."""
    return [value] if mesh is None else gathered(value, mesh.everyone, mesh.device)


def share(names: Sequence[str], mesh: Mesh | None) -> Sequence[str]:
    """This rank's part of a list."""
    return names if mesh is None else names[mesh.everyone.rank() :: mesh.everyone.size()]


def hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The sha256 of files in a folder, "" for one that is not there."""
    return {name: _hash(folder / name) for name in names}


def file_names(folder: Path) -> list[str]:
    """All files below a folder, by their relative paths with forward slashes."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _hash(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _explained(path: Path, error: Exception, needed_bytes: int | None) -> Exception:
    """The error as a ValueError that names the path, or as it is where it has nothing to do with the disk."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error):
        return ValueError(_no_space(path, needed_bytes, _free_bytes(path)))
    elsewhere = isinstance(error, OSError) and error.filename and path.parent not in Path(error.filename).parents
    if number is not None and not elsewhere:
        return ValueError(f"{path} cannot be written: {os.strerror(number)}; {_AFTERWARDS}")
    return error


def _no_space(path: Path, needed_bytes: int | None, free_bytes: int) -> str:
    needed = "" if needed_bytes is None else f" and {needed_bytes:,} bytes are needed"
    return f"{path} cannot be written: {free_bytes:,} bytes are free on its disk{needed}; {_AFTERWARDS}"


_AFTERWARDS = "what was complete before is intact, and the same command goes on from there once this is put right"


def _free_bytes(path: Path) -> int:
    """Free space on the disk that holds a path, or would hold it; without a limit where the disk does not say."""
    usage = shutil.disk_usage(next(each for each in [path, *path.parents] if each.exists()))
    return usage.free if usage.total else sys.maxsize


def _partial(final: Path) -> Path:
    return final.with_name(final.name + UNFINISHED)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
