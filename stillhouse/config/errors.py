"""Errors about an invalid configuration. An error names its key."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

from stillhouse.display import message

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

    @staticmethod
    def joined(errors: Sequence["ConfigError"]) -> "ConfigError":
        """Combine several errors into one."""
        first, *others = errors
        combined = ConfigError(first.key, "\n".join([first.problem, *map(str, others)]))
        combined.parts = tuple(errors)
        return combined


class MissingKeyError(ConfigError):
    """A required key is neither in the file nor in an option or override."""


class as_config_error(AbstractContextManager[object]):
    """Convert a ValueError of the block to a ConfigError with a key. A ConfigError of the block keeps its own key.

    key: the key of the configuration. None: errors are not converted.
    passes: other types of errors that are not converted.
    """

    def __init__(self, key: str | None, *passes: type[ValueError]):
        self.key = key
        self.passes: tuple[type[ValueError], ...] = (ConfigError, *passes)

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self.key is not None and isinstance(error, ValueError) and not isinstance(error, self.passes):
            raise ConfigError(self.key, str(error)) from error


def listed(mistakes: Sequence[ConfigError], more: int = 0) -> ConfigError:
    """One error with the first mistakes and the number of the others. more: how many are not in `mistakes`."""
    shown = list(mistakes[:MAX_LINES])
    if more := more + len(mistakes) - len(shown):
        shown.append(ConfigError(None, f"and {more:,} more mistake{'s' * (more > 1)}"))
    return shown[0] if len(shown) == 1 else ConfigError.joined(shown)
