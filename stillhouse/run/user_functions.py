"""The functions of the user's own that a configuration names."""

from collections.abc import Iterator

from stillhouse.config import ConfigError, RunConfig
from stillhouse.generation.hooks import OF_COMPLETIONS, UserFunction, load_function

CALLBACKS, REWARD, ENVIRONMENT = "eval.callbacks", "rollout.reward", "rollout.environment"


def function_of(key: str, path: str) -> UserFunction:
    """The function that a key of the configuration names. Raises ConfigError for one that cannot be used."""
    try:
        return load_function(key, path, ("context",) if key == CALLBACKS else OF_COMPLETIONS)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def all_functions(config: RunConfig) -> Iterator[UserFunction]:
    """Every function that the configuration names. Raises ConfigError as `function_of` does."""
    named: list[tuple[str, str | None]] = [(CALLBACKS, path) for path in config.eval.callbacks]
    if config.rollout is not None:
        named += [(REWARD, config.rollout.reward), (ENVIRONMENT, config.rollout.environment)]
    for key, path in named:
        if path is not None:
            yield function_of(key, path)
