"""The content types of bodies, and the types of their JSON: unknown fields and values of other types are refused."""

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

T = TypeVar("T")
SAFETENSORS, JSON = "application/vnd.safetensors", "application/json"


class _FailFast(FailFast):
    __hash__ = object.__hash__  # unions hash their members


#: a list whose validation stops at the first wrong value, because millions of values may be wrong
FirstWrong = Annotated[list[T], _FailFast()]
#: the most lists in a body of JSON: as many as tokens of a request with ids for each, by far
_MOST_LISTS = 2**18
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StrictBody(BaseModel):
    """A body that is refused if a field is unknown or has another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def require_few_lists(content: bytes) -> None:
    """Raise ValueError for a body of JSON with millions of lists, which would take seconds to make and to free."""
    if (lists := content.count(b"[")) > _MOST_LISTS:
        raise ValueError(f"{lists} lists or '[': expected at most {_MOST_LISTS} in JSON")


def first_problem(error: ValidationError) -> str:
    """The first problem of an invalid body, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else str(first["msg"])
