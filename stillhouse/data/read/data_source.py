"""Reads the records of a data source: a file, a folder, a glob, a saved `datasets` folder or a hub id.

Every record has its location, for error messages. A record that cannot be read is returned with a description of the
problem, and the caller decides whether to raise an error.
"""

import glob
import os
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from stillhouse.data.read.arrow_readers import conversation_columns, is_saved, read_hub, read_saved
from stillhouse.data.read.reader import (
    COMPRESSED,
    DECOMPRESSES,
    DROPS_NULL,
    format_of,
    kind_of,
    require_regular,
)
from stillhouse.data.record import NoSourceError, Record
from stillhouse.registry import load, registered

#: the number of files whose first record is checked early, because a shared disk may need long to open thousands
FIRST_FILES = 20
_HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.-]+))?")


def read_records(
    source: str | os.PathLike[str], columns: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Record]:
    """The records of a file, a folder of files, a glob, a saved `datasets` folder or a hub id, in a fixed order.

    Files of a folder or a glob are read in the order of their names. Only regular files and links to regular files
    are opened. Any other object with the name of a data file raises ValueError, except a folder that a glob matches.
    A `source` that does not exist on this machine is a hub id, unless it looks like a path. The hub id is passed
    unchanged to `datasets.load_dataset`. `:configuration` and `@split` may follow it, as in
    `allenai/c4:en@validation`. The default split is "train".

    columns: the names of the source's columns by the names that Stillhouse reads (see `renamed`). The records keep
        the names of the source. The mapping only says in which columns of Arrow null keys are removed.

    Raises NoSourceError if the source does not exist, and ValueError if it cannot be read.
    """
    name = os.path.expanduser(os.fspath(source))
    path, files, conversations = Path(name), local_files(source), conversation_columns(columns)
    if files is None:
        return read_hub(name, conversations, *_hub_id(name))
    if path.is_file():
        return _read_file(path, conversations)
    if is_saved(path):
        return read_saved(path, conversations)
    return (record for file in files for record in _read_file(file, conversations))


def local_files(source: str | os.PathLike[str]) -> list[Path] | None:
    """All files that `read_records` reads for this source, in a fixed order; None for a hub id.

    Raises ValueError as `read_records` does.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir() and is_saved(path):
        # each split is in a subfolder, or the folder itself is a split
        folders = [path, *(state.parent for state in path.glob("*/state.json"))]
        return require_regular(sorted(file for inner in folders for file in inner.iterdir() if not file.is_dir()))
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_readable(file))
        if not files:
            raise ValueError(
                f"{path}: neither a saved dataset nor a folder with files ending in {_suffixes()}; to search its "
                f"subfolders, too, use a glob such as '{path}/**/*.jsonl'"
            )
        twice = next((file for file in files if file.suffix in COMPRESSED and file.with_suffix("") in files), None)
        if twice is not None:
            raise ValueError(f"{path} has both {twice.name} and {twice.stem}: expected one of them, or a glob")
        return require_regular(files)
    if os.path.lexists(path):
        raise NoSourceError(f"{name} is {kind_of(path)}: expected a regular file or a folder")
    if not glob.has_magic(name):
        return None
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    if not (files := [match for match in matches if not match.is_dir()]):
        raise NoSourceError(f"no file matches {name}")
    return require_regular(files)


def require_source(source: str) -> None:
    """Raise ValueError if `local_files` does, or if a source that is not on this machine cannot be a hub id."""
    if local_files(source) is None:
        _hub_id(os.path.expanduser(source))


def first_records(source: str) -> list[Record] | None:
    """The first record of each of the first `FIRST_FILES` files of a source; None for hub ids and for folders that
    `datasets` has saved, because the library that reads them takes seconds to import. Raises ValueError as
    `read_records` does.
    """
    files = local_files(source)
    if files is None or is_saved(Path(os.path.expanduser(source))):
        return None
    return [
        record for file in files[:FIRST_FILES] for record in islice(_read_file(file, conversation_columns({})), 1)
    ]


def _hub_id(name: str) -> tuple[str, str | None, str]:
    """(name, configuration, split) of `name:configuration@split`. Raises NoSourceError if it looks like a path."""
    match = _HUB_ID.fullmatch(name)
    if match is None or match["name"].startswith(".") or _is_readable(Path(match["name"])):
        share = " (a share is written as a number, such as 0.05)" if name.endswith("%") else ""
        raise NoSourceError(f"no such file or folder: {name}{share}")
    return match["name"], match["config"], match["split"] or "train"


def _is_readable(path: Path) -> bool:
    name = format_of(path).removeprefix(".")
    if name not in registered("stillhouse.readers"):
        return False
    return path.suffix not in COMPRESSED or DECOMPRESSES in load("stillhouse.readers", name).capabilities


def _read_file(path: Path, conversations: Collection[str]) -> Iterator[Record]:
    if not _is_readable(path):
        raise ValueError(f"{path}: its format is not known; expected a name that ends in {_suffixes()}")
    reader = load("stillhouse.readers", format_of(path).removeprefix("."))
    options = [conversations] if DROPS_NULL in reader.capabilities else []
    records: Iterator[Record] = reader.read(path, *options)
    return records


def _suffixes() -> str:
    names = ", ".join(f".{name}" for name in registered("stillhouse.readers"))
    return f"{names} (text files also with {' or '.join(COMPRESSED)} after that)"
