"""The JSON and JSON-lines files of a run's folder. One is metrics.jsonl, with a line for each step and evaluation.

A run appends lines to a file that stays open; if lines cannot be written, an error is raised. The functions that read
a file return typed values, or raise an error with the file and the line or key.
"""

import errno
import functools
import itertools
import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.output.disk import UNFINISHED, explained_write_errors, flush
from stillhouse.output.records import EvalSample, SampleRecord, TimelineSpan

T = TypeVar("T")
_type_adapter = functools.cache(TypeAdapter)


class LineFile:
    """A JSON-lines file to which this process appends. When it is opened, the lines of steps after `step` and an
    incomplete last line are removed; if `step` is 0, all lines. Raises ValueError for a complete line without a step.
    """

    def __init__(self, path: Path, step: int):
        self._path = path
        with explained_write_errors(path):
            if step <= 0:
                path.unlink(missing_ok=True)
            elif path.is_file():
                partial = path.with_name(f".{path.name}{UNFINISHED}")
                with path.open("rb") as file, partial.open("wb") as kept:
                    for number, line in enumerate(file, start=1):
                        if line.endswith(b"\n") and _step(line, f"{path}:{number}") <= step:
                            kept.write(line)
                if partial.stat().st_size == path.stat().st_size:
                    partial.unlink()
                else:
                    flush(partial)
                    os.replace(partial, path)
            # unbuffered, so that closing the file does not repeat a failed write
            self._file = path.open("ab", buffering=0)

    def append(self, records: Sequence[TimelineSpan | SampleRecord | EvalSample]) -> None:
        lines = "".join(json.dumps(asdict(record), allow_nan=False) + "\n" for record in records)
        append(self._path, self._file, lines.encode())

    def close(self) -> None:
        self._file.close()


def append(path: Path, file: FileIO, lines: bytes) -> None:
    """Write to an unbuffered file. Raises ValueError if the disk is full or the file is no longer at this path."""
    with explained_write_errors(path, len(lines)):
        # without this check, writing would succeed, but into a file that is no longer at this path
        there, opened = os.stat(path), os.fstat(file.fileno())
        same = (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino)
        if not same and there.st_size != opened.st_size:  # FUSE can change inode numbers, but not sizes
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if file.write(lines) != len(lines):  # the disk had no space for all bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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


def read_lines(path: Path, parse: Callable[[bytes, str], T], notes: list[str]) -> Iterator[tuple[str, int, T]]:
    """Yield (file and line number, offset, result of `parse`) for every line.

    parse: a function of a line without its newline, and of the file and line number for errors. If it raises
    ValueError for a last line without a newline, the line is skipped, and `notes` gets a note for the report.
    """
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                value = parse(raw.removesuffix(b"\n"), where)
            except ValueError:
                if raw.endswith(b"\n"):
                    raise
                notes.append(
                    f"The last line of {path.name} is incomplete and left out: the run ended while writing it."
                )
                return
            yield where, offset, value
            offset += len(raw)


def read_objects(path: Path, notes: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (file and line number, offset, object) for every line, like `read_lines`; nothing for a missing file."""
    if path.is_file():
        if path.stat().st_size == 0:
            notes.append(f"{path.name} has no line yet.")
        yield from read_lines(path, parse_object, notes)


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if there is no file. Raises ValueError if it cannot be read."""
    if not path.is_file():
        return None
    with reading(f"{path}: cannot be read"):
        raw = path.read_bytes()
    return parse_object(raw, str(path))


def validated(kind: Callable[..., T], value: object, where: str) -> T:
    """Return the value as type `kind`. Raises ValueError with `where` and the key if the value does not fit it."""
    try:
        record: T = _type_adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        key, shown = ".".join(map(str, first["loc"])), reprlib.repr(first["input"])
        raise ValueError(f"{where}: {escaped(key)}: {first['msg'].lower()}, got {shown:.60}") from error
    return record


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a line without its newline, or a whole file. Raises ValueError with `where`."""
    with reading(f"{where}: not JSON"):
        value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {escaped(raw[:80].decode(errors='replace'))}")
    return value


@dataclass(frozen=True)
class MetricsLine:
    """A line of metrics.jsonl.

    values: the metrics, and the "tokens" and "seconds" of the run so far. A number that is not finite is None.
    """

    step: float
    values: dict[str, float | None]


def parse_metrics(raw: bytes, where: str) -> MetricsLine:
    """Parse a line without its newline. Raises ValueError with `where` and the key."""
    line = parse_object(raw, where)
    if not _is_number(line.get("step")) or not math.isfinite(line["step"]):
        shown = escaped(raw[:80].decode(errors="replace"))
        raise ValueError(f'{where}: expected an object with a number "step", got {shown}')
    for key, value in line.items():
        if value is not None and not _is_number(value):
            raise ValueError(f"{where}: {escaped(key)[:80]} is {reprlib.repr(value)}; expected a number or null")
    return MetricsLine(line.pop("step"), without_infinity(line))


def without_infinity(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replace values that are not finite with None, because JSON has no infinity and no NaN."""
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}


def read_metrics(path: Path) -> tuple[list[MetricsLine], list[str]]:
    """Return the lines of a metrics.jsonl, and notes for the report.

    An incomplete last line without a newline is skipped, because a killed run can leave such a line.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} contains no run: it has no metrics.jsonl. Give the `out` folder of a run.")
    notes: list[str] = []
    lines = [line for _, _, line in read_lines(path, parse_metrics, notes)]
    if not lines:
        notes.append(f"{path.name} has no line yet, so there is no curve.")
    for number, (before, line) in enumerate(itertools.pairwise(lines), start=2):
        if line.step < before.step:
            raise ValueError(
                f"{path}:{number}: step {line.step} follows step {before.step}; steps must not decrease. "
                "Two runs have written to this folder: remove the lines of one run, or run again with a new folder."
            )
    return lines, notes


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max  # an integer must fit into a float
