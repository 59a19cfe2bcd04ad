"""Folders that commands make once and later read again: converted models, and what `stillhouse fetch` has fetched.

They are in `$STILLHOUSE_CACHE`, or in `~/.cache/stillhouse`. A folder is complete or absent, and its manifest has the
hash of each of its files, so that a damaged folder is found and made again.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from stillhouse.display import name_list, print_progress
from stillhouse.output.disk import (
    UNFINISHED,
    atomic_folder,
    explained_write_errors,
    file_names,
    hashes,
    replace_text,
)

#: the file with the hashes of all other files of the folder
MANIFEST = "manifest.json"


def cache_root() -> Path:
    """The folder of all caches of this user."""
    return Path(os.environ.get("STILLHOUSE_CACHE") or "~/.cache/stillhouse").expanduser()


@contextmanager
def unless_complete(folder: Path, seconds: float = -1) -> Iterator[Path | None]:
    """Yield None if the folder is complete. Otherwise, yield a temporary folder for its files, which replaces the
    folder if the block ends without an error.

    Only one process at a time is in the block; the others wait, and then find the complete folder.

    seconds: the longest wait for another process; negative: without a limit. Raises ValueError if the folder cannot
    be written, and TimeoutError after this wait.
    """
    with explained_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=seconds)
    except Timeout as error:
        raise TimeoutError(
            f"{folder}: another process has been writing this folder for {seconds:.0f} seconds; wait until it ends, "
            "and repeat the command"
        ) from error
    with lock:
        problem = folder_problem(folder)
        if problem is None:
            yield None
            return
        if folder.exists():
            print_progress(f"{folder} {problem}: the folder is made again")
        for leftover in (folder, folder.with_name(folder.name + UNFINISHED)):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        with atomic_folder(folder, exclusive=True) as partial:
            yield partial
            files = hashes(partial, file_names(partial))
            replace_text(partial / MANIFEST, json.dumps({"files": files}, indent=1, sort_keys=True) + "\n")


def folder_problem(folder: Path) -> str | None:
    """Say what differs between a folder and its manifest; None if all files are as they were written."""
    if not folder.is_dir():
        return "does not exist"
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return f"has no readable {MANIFEST}"
    names = {*file_names(folder)} - {MANIFEST}
    if names != set(expected):
        return f"has other files than its {MANIFEST} ({name_list(names ^ set(expected))})"
    changed = [name for name, digest in hashes(folder, expected).items() if digest != expected[name]]
    return f"has changed files ({name_list(changed)})" if changed else None
