"""Reads records from CSV and TSV files: a header line, and quoted fields that may contain newlines."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stillhouse.data.read.open_files import DECOMPRESSES, MAX_BYTES, Reader, format_of, open_bytes
from stillhouse.data.record import DataError, Record


class Csv(Reader):
    capabilities, delimiter = (DECOMPRESSES,), ","

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """The records of a UTF-8 file. The first line is the header. All values are strings. Empty lines are skipped.

        Raises DataError for a missing or invalid header and for damaged quotes.
        """
        csv.field_size_limit(MAX_BYTES)  # changes the limit of the process; the default is 128 KiB
        with open_bytes(path) as file:
            rows = csv.reader(_lines(file), delimiter=cls.delimiter, strict=True)
            names: list[str] | None = None
            while True:
                where = f"{path}:{rows.line_num + 1}"
                try:
                    values = next(rows, None)
                except csv.Error as error:
                    raise DataError(where, f"not valid {format_of(path)[1:].upper()}: {error}") from error
                if values is None:
                    return
                if values and names is not None:
                    yield _record(where, names, values)
                elif values:
                    twice = next((name for name in values if values.count(name) > 1), None)
                    if twice is not None:
                        raise DataError(
                            where, f"the header names the column {twice!r} twice; expected different names"
                        )
                    if any(map(_damaged, values)):
                        raise DataError(where, "the header is not UTF-8 text")
                    names = values


class Tsv(Csv):
    delimiter = "\t"


def _lines(file: BinaryIO) -> Iterator[str]:
    """Lines that end only at a line feed. Bytes that are not UTF-8 become lone surrogates, which `_damaged` finds."""
    encoding = "utf-8-sig"
    while line := file.readline(MAX_BYTES + 1):
        if len(line) > MAX_BYTES:
            raise csv.Error(f"a line is longer than {MAX_BYTES:,} bytes; expected shorter records")
        yield line.decode(encoding, "surrogateescape")
        encoding = "utf-8"


def _damaged(text: str) -> bool:
    """Whether the text was decoded from bytes that are not UTF-8."""
    return not text.isascii() and any("\udc80" <= character <= "\udcff" for character in text)


def _record(where: str, names: list[str], values: list[str]) -> Record:
    if len(values) != len(names):
        return Record(where, problem=f"has {len(values)} fields, expected {len(names)}: {', '.join(names)}")
    for name, value in zip(names, values, strict=True):
        if _damaged(value):
            return Record(where, problem=f"not UTF-8 text in the column {name!r}")
    return Record(where, dict(zip(names, values, strict=True)))
