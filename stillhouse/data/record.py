"""A record of the data with its location, checks of its columns, and the errors for invalid records."""

import json
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from stillhouse.display import escaped, name_list

#: the maximum number of characters of a record, because a tokenizer needs about 200 bytes of memory per character
MAX_CHARACTERS = 4_000_000

_NAMES = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Record:
    """One record and its location. If the record could not be read, `problem` is the error and `fields` is empty.

    where: `file:line` (or `file:row`), counted from 1.
    """

    where: str
    fields: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class NoSourceError(ValueError):
    """The data source does not exist."""


class DataError(ValueError):
    """An invalid record. where: `file:line`. reason: the value that was found and the expected one."""

    def __init__(self, where: str, reason: str):
        super().__init__(escaped(f"{where}: {reason}", lines=True))
        self.where, self.reason = where, reason


class RecordError(ValueError):
    """An invalid record. The message does not contain the record's location; the caller adds it."""


class ProcessorError(ValueError):
    """The data has images, but the student has no usable processor. The error concerns all records."""


class TemplateLimitError(ValueError):
    """The chat template exceeds its limits. The error concerns all records, so on_error="skip" does not skip it."""


class TemplateSyntaxError(ValueError):
    """The chat template is not valid Jinja. The error concerns all records.

    problem: the error and its line as the end of a sentence, such as "has a syntax error in line 3: …".
    """

    def __init__(self, tokenizer: str, problem: str):
        super().__init__(f"the chat template of {tokenizer!r} {problem}: correct it, or set data.chat_template")
        self.problem = problem


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs. Raises ValueError for a repeated key (`json` would keep the last value)."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {reprlib.repr(key)} twice; expected each key once")
    return fields


parsed_json = json.JSONDecoder(object_pairs_hook=unique_keys).decode


def value_in_words(value: Any) -> str:
    """A value for an error message: its JSON type and, if it is short, the value itself."""
    if value is None:
        return "null"
    kind = _NAMES.get(type(value), type(value).__name__)
    shown = reprlib.repr(value)
    return f"{kind} ({escaped(shown)})" if len(shown) <= 40 and "..." not in shown else kind


def column_value(fields: Mapping[str, Any], column: str) -> Any:
    """The value of a column. Raises RecordError if the record does not have it."""
    if column not in fields:
        raise RecordError(f"column '{column}' is missing (found {name_list(fields)})")
    return fields[column]


def kept_value(fields: Mapping[str, Any], column: str, allowed: Collection[Any] | None) -> Any:
    """The value of a column to keep. Raises RecordError for null and for a value not in `allowed` (None: any)."""
    value = column_value(fields, column)
    if value is None:  # Parquet stores absent values as null
        raise RecordError(f"column '{column}' is null; expected a value in every record")
    if allowed is not None and value not in allowed:
        raise RecordError(f"column '{column}' is {value_in_words(value)}: expected one of {name_list(allowed)}")
    return value


def string_value(fields: Mapping[str, Any], column: str, *, may_be_empty: bool = False) -> str:
    """The text of a column. Raises RecordError for another type, invalid Unicode, and an empty or too long text."""
    value = column_value(fields, column)
    if not isinstance(value, str):
        raise RecordError(f"'{column}' must be a string, got {value_in_words(value)}")
    if not value and not may_be_empty:
        raise RecordError(f"'{column}' is empty")
    require_length(len(value), f"'{column}'")
    require_encodable(value, f"'{column}'")
    return value


def require_length(characters: int, what: str) -> None:
    """Raise RecordError for more than `MAX_CHARACTERS` characters. what: the name of the text in the error."""
    if characters > MAX_CHARACTERS:
        raise RecordError(
            f"{what} has {characters:,} characters; expected at most {MAX_CHARACTERS:,} in one record: cut it into "
            "several records"
        )


def require_encodable(text: str, what: str) -> None:
    """Raise RecordError for a text that UTF-8 cannot represent. what: the name of the text in the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{what} contains half of a surrogate pair at character {error.start + 1}") from error


def without_null(value: Any) -> Any:
    """Remove keys with the value null, at all depths. (Parquet fills absent keys with null.)"""
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_null(inner) for inner in value]
    return value
