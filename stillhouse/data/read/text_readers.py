"""Reads records of text files: JSON Lines, one JSON array, and CSV or TSV with a header line.

This module splits JSON Lines itself, without a library, because an error must name the record's line.
"""

import codecs
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from stillhouse.data.read.reader import DECOMPRESSES, MAX_BYTES, Reader, format_of, open_bytes
from stillhouse.data.record import DataError, Record, parsed_json, unique_keys, value_in_words
from stillhouse.display import first_line

#: the characters into which `surrogateescape` converts bytes that are not UTF-8
_SURROGATES = re.compile("[\udc80-\udcff]")


class Json(Reader):
    capabilities = (DECOMPRESSES,)

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """The records of a JSON Lines file; a file named .json may also contain one array."""
        if format_of(path) == ".json":
            with open_bytes(path) as file:
                start = file.read(3).removeprefix(codecs.BOM_UTF8)
                while not start.strip() and (more := file.read(2**16)):
                    start = more
            if start.lstrip().startswith(b"["):
                yield from _read_array(path)
                return
        with open_bytes(path) as file:  # read bytes, so that only \n ends a line, and invalid UTF-8 affects one line
            for number, line in enumerate(_lines(file), start=1):
                where = f"{path}:{number}"
                if len(line) > MAX_BYTES:
                    yield Record(where, problem=f"a line longer than {MAX_BYTES:,} bytes; expected shorter records")
                elif line.strip():
                    yield _parse_line(where, line)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. A line longer than `MAX_BYTES` is cut to its first `MAX_BYTES + 1` bytes."""
    while line := file.readline(MAX_BYTES + 1):
        rest = line
        while len(rest) > MAX_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_BYTES + 1)
        yield line


def _parse_line(where: str, line: bytes) -> Record:
    try:
        fields = parsed_json(line.rstrip(b"\r\n").decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text: byte {error.start + 1} of the line is {line[error.start]:#04x}"
    except json.JSONDecodeError as error:
        problem = f"not valid JSON: {error.msg} at column {error.colno}; expected one object per line"
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or deep nesting
        problem = f"not readable as JSON: {first_line(error)}"
    else:
        if isinstance(fields, dict):
            return Record(where, fields)
        problem = f"expected a JSON object per line, got {value_in_words(fields)}"
    return Record(where, problem=problem)


def _read_array(path: Path) -> Iterator[Record]:
    """The elements of a JSON array, each with the line on which it begins.

    An array that is not valid JSON always raises DataError, because the start of the next element is unknown.
    """
    with open_bytes(path) as file:
        content = file.read()
    line, at, counted = 1, 0, 0
    try:
        text = content.decode("utf-8-sig")
        decoder, at = json.JSONDecoder(object_pairs_hook=unique_keys), _next_character(text, 0) + 1
        at = _next_character(text, at)
        line, counted = 1 + text.count("\n", 0, at), at
        while text[at] != "]":
            line, counted = line + text.count("\n", counted, at), at
            fields, at = decoder.raw_decode(text, at)
            is_object = isinstance(fields, dict)
            problem = "" if is_object else f"expected an array of JSON objects, got {value_in_words(fields)} in it"
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
    """The position of the next character that is not white space, or the length of the text."""
    while text[at : at + 1] in (" ", "\t", "\r", "\n"):
        at += 1
    return at


class Csv(Reader):
    capabilities, delimiter = (DECOMPRESSES,), ","

    @classmethod
    def read(cls, path: Path) -> Iterator[Record]:
        """The records of a UTF-8 file. The first line is the header. All values are strings. Empty lines are skipped.

        Raises DataError for a missing or invalid header and for damaged quotes.
        """
        csv.field_size_limit(MAX_BYTES)  # a limit of the whole process; the default is 128 KiB
        with open_bytes(path) as file:
            rows = csv.reader(_decoded(file), delimiter=cls.delimiter, strict=True)
            names: list[str] | None = None
            while True:
                where = f"{path}:{rows.line_num + 1}"
                try:
                    values = next(rows, None)
                except csv.Error as error:
                    raise DataError(where, f"not valid {format_of(path)[1:].upper()}: {error}") from error
                if values is None:
                    return
                if not values:
                    continue
                damaged = [number for number, value in enumerate(values) if _SURROGATES.search(value)]
                if names is None:
                    twice = next((name for name in values if values.count(name) > 1), None)
                    if twice is not None:
                        reason = f"the header names the column {twice!r} twice; expected different names"
                        raise DataError(where, reason)
                    if damaged:
                        raise DataError(where, "the header is not UTF-8 text")
                    names = values
                elif len(values) != len(names):
                    expected = f"expected {len(names)}: {', '.join(names)}"
                    yield Record(where, problem=f"has {len(values)} fields, {expected}")
                elif damaged:
                    yield Record(where, problem=f"not UTF-8 text in the column {names[damaged[0]]!r}")
                else:
                    yield Record(where, dict(zip(names, values, strict=True)))


class Tsv(Csv):
    delimiter = "\t"


def _decoded(file: BinaryIO) -> Iterator[str]:
    """The lines as text; only a line feed ends a line. Bytes that are not UTF-8 become lone surrogates."""
    encoding = "utf-8-sig"
    for line in _lines(file):
        if len(line) > MAX_BYTES:
            raise csv.Error(f"a line is longer than {MAX_BYTES:,} bytes; expected shorter records")
        yield line.decode(encoding, "surrogateescape")
        encoding = "utf-8"
