"""Reads lines of JSON and turns values from a run's files into typed ones, with errors that name the place."""

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from stillhouse.display import escaped
from stillhouse.libraries import reading

#: the note about a file whose last line cannot be read
INCOMPLETE = "The last line of {} is incomplete and left out: the run was stopped while it wrote it."

Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], value: object, where: str) -> Model:
    """Return the value as this model. Raises ValueError that begins with `where` and names the key."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        shown = reprlib.repr(first["input"])
        raise ValueError(f"{where}: {escaped(key)}: {first['msg'].lower()}, got {shown:.60}") from error


def json_lines(path: Path, notes: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield (file and line number, offset, object) of every line.

    Only a last line without a newline may be unreadable: it is left out, and `notes` gets a note for the page. Raises
    ValueError for another line that is no JSON object.
    """
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                with reading(f"{where}: not a JSON object"):
                    value = json.loads(raw)
                if not isinstance(value, dict):
                    raise ValueError(f"{where}: expected an object, got {escaped(raw[:80].decode(errors='replace'))}")
            except ValueError:
                if raw.endswith(b"\n"):
                    raise
                notes.append(INCOMPLETE.format(path.name))
                return
            yield where, offset, value
            offset += len(raw)
    if offset == 0:
        notes.append(f"{path.name} has no line yet.")
