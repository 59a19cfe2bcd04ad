"""Reads records from CSV and TSV files: a header line, and quoted fields that may contain newlines."""

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

DELIMITERS = {".csv": ",", ".tsv": "\t"}
CSV = tuple(DELIMITERS)


class Row(NamedTuple):
    """A record and the number of its first line. If it cannot be used, `problem` says why."""

    line: int
    fields: dict[str, Any]
    problem: str = ""


class CsvDamageError(ValueError):
    """The quotes of a record are damaged, so that nobody knows where the next record begins."""

    def __init__(self, line: int, reason: str):
        super().__init__(reason)
        self.line = line


def read_csv(file: BinaryIO, suffix: str, most_bytes: int) -> Iterator[Row]:
    """The records of a file in UTF-8, whose first line has the names of the columns. All values are strings.

    Empty lines are left out. Raises CsvDamageError for a file without a usable header and for damaged quotes.
    """
    csv.field_size_limit(most_bytes)  # the limit of the whole process, by default 128 KiB
    rows = csv.reader(_lines(file, most_bytes), delimiter=DELIMITERS[suffix], strict=True)
    names: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            values = next(rows, None)
        except csv.Error as error:
            raise CsvDamageError(line, f"not valid {suffix[1:].upper()}: {error}") from error
        if values is None:
            return
        if not values:
            continue
        if names is None:
            names = _header(line, values)
            continue
        yield _row(line, names, values)


def _lines(file: BinaryIO, most_bytes: int) -> Iterator[str]:
    """Lines that end at a newline only. Bytes that are not UTF-8 become lone surrogates, which `_row` finds."""
    encoding = "utf-8-sig"
    while line := file.readline(most_bytes + 1):
        if len(line) > most_bytes:
            raise csv.Error(f"a line is longer than {most_bytes:,} bytes; expected shorter records")
        yield line.decode(encoding, "surrogateescape")
        encoding = "utf-8"


def _header(line: int, names: list[str]) -> list[str]:
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CsvDamageError(line, f"the header names the column {twice!r} twice; expected different names")
    if any(map(_damaged, names)):
        raise CsvDamageError(line, "the header is not UTF-8 text")
    return names


def _damaged(text: str) -> bool:
    """Whether there were bytes in it that are not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for character in text)


def _row(line: int, names: list[str], values: list[str]) -> Row:
    if len(values) != len(names):
        return Row(line, {}, f"has {len(values)} fields, expected {len(names)}: {', '.join(names)}")
    for name, value in zip(names, values, strict=True):
        if not value.isascii() and _damaged(value):
            return Row(line, {}, f"not UTF-8 text in the column {name!r}")
    return Row(line, dict(zip(names, values, strict=True)))
