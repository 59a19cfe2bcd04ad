"""Turns a value from a run's file into a typed one, with errors that name the place."""

import reprlib
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from stillhouse.display import escaped

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
