"""What several tests use: models, data, runs, servers and ranks for tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case of a parametrized test that `make test` leaves out. options: of `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def first_is_quick(values: Iterable[Any]) -> list[Any]:
    """Return the parameters of a test, all but the first of them slow."""
    first, *others = values
    return [first, *map(slow, others)]
