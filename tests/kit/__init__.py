"""What several tests use: models, data, runs, servers and ranks for tests."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case of a parametrized test that `make test` leaves out. options: of `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def first_is_quick(values: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test, all but the first of them slow."""
    first, *others = values
    return [first, *map(slow, others)]


class NamedCase:
    """A dataclass with a name for the id of a test: what is not the default."""

    @property
    def name(self) -> str:
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}  # type: ignore[arg-type]
        changed = {name: value for name, (value, default) in values.items() if value and value != default}
        return "-".join(_shown(name, value) for name, value in changed.items()) or "plain"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, int):
        return name if value is True else f"{name}{value}"
    return str(getattr(value, "name", value)).replace(" × ", "-").replace(" ", "")[:60]
