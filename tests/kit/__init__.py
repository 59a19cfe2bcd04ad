"""What several tests use: models, data, runs, servers and ranks for tests."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case of a parametrized test that `make test` leaves out. options: of `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
