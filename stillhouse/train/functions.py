"""The functions of the user's own that a configuration names."""

from collections.abc import Callable
from typing import Any

from stillhouse.config import ConfigError
from stillhouse.rollouts.hooks import load_function


def function_of(key: str, path: str | None) -> Callable[..., Any] | None:
    """The function that a key of the configuration names; None without one. Raises ConfigError if there is none."""
    try:
        return None if path is None else load_function(path)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error
