"""What a wrong configuration raises: an error that carries the key it is about."""

from collections.abc import Sequence

from stillhouse.display import message


class ConfigError(ValueError):
    """A configuration that cannot be used.

    `key` is the full dotted path (`train.learning_rate`), None where no single key is to blame (a missing file).
    Its text is `key: problem`. A configuration with several faults gives one error with a line for each, the first
    one's key and all of them in `parts`.
    """

    def __init__(self, key: str | None, problem: str) -> None:
        super().__init__(message(problem if key is None else f"{key}: {problem}"))
        self.key = key
        self.problem = problem
        self.parts: tuple[ConfigError, ...] = (self,)

    @staticmethod
    def joined(errors: Sequence["ConfigError"]) -> "ConfigError":
        """One error for several."""
        first, *others = errors
        whole = ConfigError(first.key, "\n".join([first.problem, *map(str, others)]))
        whole.parts = tuple(errors)
        return whole


class MissingKeyError(ConfigError):
    """A required key was given nowhere."""
