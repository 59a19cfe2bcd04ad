"""Where records come from: JSON Lines, Parquet, saved `datasets` folders, hub ids.

Every record carries the place it was read from, `file:line` (or `file:row`, counted from 1), because that
is what an error about it must name. JSON Lines is read line by line here, not by a library, for the same
reason. A record that cannot be read is handed on with its problem: whether it stops the run is for the
caller to say.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON_LINES = (".jsonl", ".json")
PARQUET = (".parquet",)
_HUB_ID = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.-]+))?")


class DataError(ValueError):
    """A record that cannot be used: `where` is `file:line`, `reason` what was found and what was expected."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


@dataclass(frozen=True)
class Record:
    """One record and its place; `problem` says why it could not be read (then `fields` is empty)."""

    where: str
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_records(source: str | os.PathLike[str]) -> Iterator[Record]:
    """The records of a file, a folder of files, a glob, a saved `datasets` folder or a hub id, in a fixed
    order.

    Files of a folder or a glob come in the order of their names. What exists here is read from here; any
    other name is one of the hub, unless it looks like a path: then the file is missing. A hub id goes to
    `datasets.load_dataset` untouched; `:configuration` and `@split` may follow it, as in
    `allenai/c4:en@validation`, and the split is "train" where none is given.

    Raises ValueError if there is nothing to read under that name.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path)
    if glob.has_magic(name):
        return _read_files(_matches(name))
    hub = _parse_hub_id(name)
    if hub is None:
        raise ValueError(f"no such file or folder: {name}")
    return _read_dataset(name, _load_from_hub(name, *hub))


def _parse_hub_id(given: str) -> tuple[str, str | None, str] | None:
    """(name, configuration, split) of `name:configuration@split`; None if it looks like a path."""
    match = _HUB_ID.fullmatch(given)
    if match is None or match["name"].startswith(".") or match["name"].endswith(JSON_LINES + PARQUET):
        return None
    return match["name"], match["config"], match["split"] or "train"


def _matches(pattern: str) -> list[Path]:
    paths = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ValueError(f"no file matches {pattern}")
    return files


def _read_folder(folder: Path) -> Iterator[Record]:
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return _read_dataset(str(folder), _load_saved(folder))
    files = sorted(path for path in folder.iterdir() if path.suffix in JSON_LINES + PARQUET)
    if not files:
        raise ValueError(
            f"{folder}: neither a saved dataset nor a folder with files ending in "
            f"{', '.join(JSON_LINES + PARQUET)} (subfolders are not searched; "
            f"a glob such as '{folder}/**/*.jsonl' does that)"
        )
    return _read_files(files)


def _read_files(files: Iterable[Path]) -> Iterator[Record]:
    return (record for path in files for record in _read_file(path))


def _read_file(path: Path) -> Iterator[Record]:
    if path.suffix in PARQUET:
        return _read_parquet(path)
    if path.suffix in JSON_LINES:
        return _read_json_lines(path)
    raise ValueError(f"{path}: cannot tell the format; expected a name ending in {', '.join(JSON_LINES + PARQUET)}")


def _read_json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as lines:  # bytes: a line ends at \n only, and a wrong encoding is an error of its line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_line(f"{path}:{number}", line)


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
        return Record(where, problem=f"not readable as JSON: {error}")
    if not isinstance(fields, dict):
        return Record(where, problem=f"expected a JSON object per line, got {describe(fields)}")
    return Record(where, fields)


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path}:{number}", fields)
    except pyarrow.ArrowException as error:
        after = f" after row {number}" if number else ""
        raise ValueError(f"{path}: not a readable Parquet file{after}: {error}") from error


def _load_saved(folder: Path) -> Any:
    import datasets

    loaded = datasets.load_from_disk(str(folder))
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise ValueError(
        f"{folder}: holds the splits {', '.join(sorted(loaded))}; name one of their folders, such as "
        f"{folder / min(loaded, key=lambda split: split != 'train')}"
    )


def _load_from_hub(given: str, name: str, config: str | None, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{given}: no file or folder of this name here, and no dataset on the hub: {error}"
        ) from error
    except ValueError as error:  # no such split, no such configuration, or several and none is named
        raise ValueError(
            f"{given}: the hub's dataset cannot be loaded ({name}:configuration@split names a part of it): {error}"
        ) from error


def _read_dataset(name: str, dataset: Any) -> Iterator[Record]:
    return (Record(f"{name}:{number}", fields) for number, fields in enumerate(dataset, start=1))


def describe(value: Any) -> str:
    """A value as an error shows it: its JSON type and, where short, the value."""
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
    shown = repr(value)
    return f"{kind} ({shown})" if len(shown) <= 40 else kind
