"""Reads records from JSON Lines, JSON arrays, CSV, Parquet, saved `datasets` folders and hub ids.

Every record has its location, `file:line` (or `file:row`, counted from 1), because an error about the record must
name it. For the same reason JSON Lines is read line by line here, not by a library. A record that cannot be read is
returned with a description of the problem, and the caller decides whether it stops the run.
"""

import codecs
import glob
import itertools
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from stillhouse.data.compressed import COMPRESSED, format_of, open_bytes
from stillhouse.data.csv_files import CSV, CsvDamageError, read_csv
from stillhouse.data.file_kinds import kind_of, require_regular
from stillhouse.display import escaped, first_line, name_list
from stillhouse.libraries import reading

JSON_LINES = (".jsonl", ".json")
PARQUET = (".parquet",)
#: endings of files that can be read; all but Parquet also with one of `COMPRESSED` behind it
SUFFIXES = JSON_LINES + CSV + PARQUET
#: longest line of JSON; a longer line is not read completely
MOST_BYTES = 32 * 2**20
_HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.-]+))?")


class DataError(ValueError):
    """A record that cannot be used: `where` is `file:line`, `reason` what was found and what was expected."""

    def __init__(self, where: str, reason: str):
        super().__init__(escaped(f"{where}: {reason}", lines=True))
        self.where = where
        self.reason = reason


class NoSourceError(ValueError):
    """There is nothing to read under the given name."""


@dataclass(frozen=True)
class Record:
    """One record and its location. If it could not be read, `problem` says why, and `fields` is empty."""

    where: str
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_records(source: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, a folder of files, a glob, a saved `datasets` folder or a hub id, in a fixed order.

    Files of a folder or a glob are read in the order of their names. Only regular files and links to them are opened;
    other things with the name of a data file are refused, but for folders that a glob matches. A name that exists on
    this machine is read locally. Any other name is a hub id, unless it looks like a path, which is then reported as
    missing. The hub id is passed unchanged to `datasets.load_dataset`. `:configuration` and `@split` may follow it,
    as in `allenai/c4:en@validation`; the default split is "train".

    Raises NoSourceError if there is nothing under that name, and ValueError if it cannot be read.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path)
    if os.path.lexists(path):
        raise NoSourceError(f"{name} is {kind_of(path)}: expected a regular file or a folder")
    if glob.has_magic(name):
        return _read_files(_matches(name))
    hub = _parse_hub_id(name)
    if hub is None:
        raise NoSourceError(f"no such file or folder: {name}")
    return _read_dataset(name, _load_from_hub(name, *hub))


def local_files(source: str | os.PathLike[str]) -> list[Path] | None:
    """All files that `read_records` reads for this source, in a fixed order; None for a hub id.

    Raises ValueError as `read_records` does.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _saved_files(path) if _is_saved(path) else _files_of(path)
    return _matches(name) if glob.has_magic(name) else None


def _parse_hub_id(given: str) -> tuple[str, str | None, str] | None:
    """(name, configuration, split) of `name:configuration@split`; None if it looks like a path."""
    match = _HUB_ID.fullmatch(given)
    if match is None or match["name"].startswith(".") or _is_readable(Path(match["name"])):
        return None
    return match["name"], match["config"], match["split"] or "train"


def _matches(pattern: str) -> list[Path]:
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if not path.is_dir()]
    if not files:
        raise NoSourceError(f"no file matches {pattern}")
    for path in files:
        require_regular(path)
    return files


def _read_folder(folder: Path) -> Iterator[Record]:
    if _is_saved(folder):
        return _read_dataset(str(folder), _load_saved(folder))
    return _read_files(_files_of(folder))


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _saved_files(folder: Path) -> list[Path]:
    """All files of a saved dataset, which has each split in a subfolder, or is one split itself."""
    parts = [folder, *(state.parent for state in folder.glob("*/state.json"))]
    files = sorted(each for part in parts for each in part.iterdir() if not each.is_dir())
    for path in files:
        require_regular(path)
    return files


def _files_of(folder: Path) -> list[Path]:
    """The files of a folder, in the order of their names."""
    files = sorted(path for path in folder.iterdir() if _is_readable(path))
    if not files:
        raise ValueError(
            f"{folder}: neither a saved dataset nor a folder with files ending in "
            f"{_expected()} (subfolders are not searched; "
            f"a glob such as '{folder}/**/*.jsonl' does that)"
        )
    twice = next((path for path in files if path.suffix in COMPRESSED and path.with_suffix("") in files), None)
    if twice is not None:
        raise ValueError(f"{folder} has both {twice.name} and {twice.stem}: expected one of them, or a glob")
    for path in files:
        require_regular(path)
    return files


def _is_readable(path: Path) -> bool:
    return format_of(path) in SUFFIXES and not (path.suffix in COMPRESSED and format_of(path) in PARQUET)


def _expected() -> str:
    return f"{', '.join(SUFFIXES)}, or of a text file with {' or '.join(COMPRESSED)} behind it"


def _read_files(files: Iterable[Path]) -> Iterator[Record]:
    return (record for path in files for record in _read_file(path))


def _read_file(path: Path) -> Iterator[Record]:
    if not _is_readable(path):
        raise ValueError(f"{path}: its format is not known; expected a name that ends in {_expected()}")
    suffix = format_of(path)
    if suffix in PARQUET:
        return _read_parquet(path)
    return _read_csv(path, suffix) if suffix in CSV else _read_json(path, suffix)


def _read_json(path: Path, suffix: str) -> Iterator[Record]:
    """JSON Lines; a file named .json may also be one array."""
    if suffix == ".json" and _is_array(path):
        yield from _read_array(path)
        return
    with open_bytes(path) as file:  # bytes, so that only \n ends a line and a wrong encoding is an error of one line
        for number, line in enumerate(_lines(file), start=1):
            if len(line) > MOST_BYTES:
                yield Record(
                    f"{path}:{number}", problem=f"longer than {MOST_BYTES:,} bytes; expected shorter records"
                )
            elif line.strip():
                yield _parse_line(f"{path}:{number}", line)


def _is_array(path: Path) -> bool:
    with open_bytes(path) as file:
        start = file.read(3).removeprefix(codecs.BOM_UTF8)
        while not start.strip() and (more := file.read(2**16)):
            start = more
    return start.lstrip().startswith(b"[")


def _read_array(path: Path) -> Iterator[Record]:
    """The elements of a JSON array, each with the line on which it begins.

    An array that is not valid JSON always raises ValueError: nobody knows where the next element begins.
    """
    with open_bytes(path) as file:
        content = file.read()
    line, at, counted = 1, 0, 0
    try:
        text = content.decode("utf-8-sig")
        decoder, at = json.JSONDecoder(), _next_character(text, 0) + 1
        at = _next_character(text, at)
        line, counted = 1 + text.count("\n", 0, at), at
        while text[at] != "]":
            line, counted = line + text.count("\n", counted, at), at
            fields, at = decoder.raw_decode(text, at)
            is_object = isinstance(fields, dict)
            problem = "" if is_object else f"expected an array of JSON objects, got {describe(fields)} in it"
            yield Record(f"{path}:{line}", fields if is_object else {}, problem)
            at = _next_character(text, at)
            if text[at] == ",":
                at = _next_character(text, at + 1)
                if text[at] == "]":
                    raise ValueError("an element is missing after a comma")
            elif text[at] != "]":
                raise ValueError("',' or ']' is missing after an element")
        if text[at + 1 :].strip():
            raise ValueError("something follows the array")
    except (ValueError, IndexError, RecursionError) as error:
        reason = "the file ends within the array" if isinstance(error, IndexError) else first_line(error)
        raise DataError(f"{path}:{line}", f"not a readable JSON array, from this record on: {reason}") from error


def _next_character(text: str, at: int) -> int:
    """The position of the next character that is not white space. It may lie behind the text."""
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


def _read_csv(path: Path, suffix: str) -> Iterator[Record]:
    with open_bytes(path) as file:
        try:
            for row in read_csv(file, suffix, MOST_BYTES):
                yield Record(f"{path}:{row.line}", row.fields, row.problem)
        except CsvDamageError as error:
            raise DataError(f"{path}:{error.line}", str(error)) from error


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file; of a line longer than `MOST_BYTES`, only its first `MOST_BYTES + 1` bytes."""
    while line := file.readline(MOST_BYTES + 1):
        rest = line
        while len(rest) > MOST_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MOST_BYTES + 1)
        yield line


def _parse_line(where: str, line: bytes) -> Record:
    try:
        fields = json.loads(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Record(
            where, problem=f"not UTF-8 text: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        )
    except json.JSONDecodeError as error:
        return Record(
            where,
            problem=f"not valid JSON: {error.msg} at column {error.colno}; expected one object per line",
        )
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits, thousands of nested brackets
        return Record(where, problem=f"not readable as JSON: {first_line(error)}")
    if not isinstance(fields, dict):
        return Record(where, problem=f"expected a JSON object per line, got {describe(fields)}")
    return Record(where, fields)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet

    number = 0
    with reading(f"{path}: not a readable Parquet file"):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        batches = file.iter_batches(batch_size=1024)
        while True:
            with reading(f"{path}: not a readable Parquet file{f' after row {number}' if number else ''}"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for fields in rows:
                number += 1
                yield Record(f"{path}:{number}", fields)


def _load_saved(folder: Path) -> Any:
    import datasets

    _saved_files(folder)  # each of them is a regular file, which `datasets` does not check
    for state in (folder / "state.json", *sorted(folder.glob("*/state.json"))):
        if state.is_file():
            with reading(f"{folder}: not a readable saved dataset"):
                files = json.loads(state.read_bytes())["_data_files"]
            if not files:
                raise ValueError(f"{state.parent}: the saved dataset is empty; expected records")
    with reading(f"{folder}: not a readable saved dataset"):
        loaded = datasets.load_from_disk(str(folder))
        for each in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
            each.data.table.validate(full=True)  # a damaged offset could point anywhere in memory
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    if not loaded:
        raise ValueError(f"{folder}: the saved dataset is empty; expected a split with records")
    raise ValueError(
        f"{folder}: contains the splits {name_list(loaded)}; name the folder of one split, such as "
        f"{folder / min(loaded, key=lambda split: split != 'train')}"
    )


def _load_from_hub(given: str, name: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise NoSourceError(
            f"{given}: no file or folder of this name here, and no dataset on the hub: {error}"
        ) from error
    except ValueError as error:  # the split or configuration does not exist, or there are several and none is named
        raise ValueError(
            f"{given}: the hub's dataset cannot be loaded ({name}:configuration@split names a part of it): {error}"
        ) from error


def _read_dataset(name: str, dataset: Any) -> Iterator[Record]:
    rows = iter(dataset)
    for number in itertools.count(1):
        with reading(f"{name}:{number}: not a readable record"):
            fields = next(rows, None)
        if fields is None:
            return
        yield Record(f"{name}:{number}", fields)


def describe(value: Any) -> str:
    """A value as an error message shows it: its JSON type and, if it is short, the value itself."""
    names = {
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "null"
    kind = names.get(type(value), type(value).__name__)
    shown = reprlib.repr(value)
    return f"{kind} ({escaped(shown)})" if len(shown) <= 40 and "..." not in shown else kind
