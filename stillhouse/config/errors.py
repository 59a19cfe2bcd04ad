"""Errors about an invalid configuration. An error names its key."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BeforeValidator

from stillhouse.display import counted, message

#: the maximum number of mistakes that one error lists
MAX_LINES = 17


class ConfigError(ValueError):
    """An invalid configuration.

    `key` is the full dotted path (`train.learning_rate`), or None if the error does not concern a single key (for
    example a missing file). The text is `key: problem`. An error for several mistakes has one line per mistake. Its
    `key` is the key of the first mistake, and `parts` has one error per mistake.
    """

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(message(problem if key is None else f"{key}: {problem}"))
        self.key = key
        self.problem = problem
        self.parts: tuple[ConfigError, ...] = (self,)


class MissingKeyError(ConfigError):
    """A required key is neither in the file nor in an option or override."""


def removed_value(value: str, reason: str, expected: str) -> BeforeValidator:
    """Return a validator that refuses a value of earlier versions.

    reason: when and why the value was removed. expected: the values to use instead, in words.
    """

    def check(given: Any) -> Any:
        if isinstance(given, str) and given.lower() == value:
            raise ValueError(f"{value} does not exist any more: {reason}; expected {expected}")
        return given

    return BeforeValidator(check)


@contextmanager
def as_config_error(key: str | None, *passes: type[ValueError]) -> Iterator[None]:
    """Convert a ValueError of the block to a ConfigError with a key. A ConfigError of the block keeps its own key.

    key: the key. If it is None, errors are not converted.
    passes: types of errors that are not converted, in addition to ConfigError.
    """
    try:
        yield
    except ValueError as error:
        if key is None or isinstance(error, (ConfigError, *passes)):
            raise
        raise ConfigError(key, str(error)) from error


def listed(mistakes: Sequence[ConfigError], more: int = 0) -> ConfigError:
    """Return one error with the first `MAX_LINES` mistakes and the number of the remaining mistakes.

    more: the number of mistakes that are not in `mistakes`.
    """
    shown = list(mistakes[:MAX_LINES])
    if more := more + len(mistakes) - len(shown):
        shown.append(ConfigError(None, f"and {counted(more, 'more mistake')}"))
    if len(shown) == 1:
        return shown[0]
    first, *others = shown
    error = ConfigError(first.key, "\n".join([first.problem, *map(str, others)]))
    error.parts = tuple(shown)
    return error
