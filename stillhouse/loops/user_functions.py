"""The functions of the user's own that a configuration names."""

from stillhouse.config import EvalConfig, RolloutConfig, as_config_error
from stillhouse.generation.hooks import OF_COMPLETIONS, UserFunction, load_function

CALLBACKS, REWARD, ENVIRONMENT = "eval.callbacks", "rollout.reward", "rollout.environment"


def function_of(key: str, path: str) -> UserFunction:
    """The function that a key of the configuration names. Raises ConfigError for one that cannot be used."""
    with as_config_error(key):
        return load_function(key, path, ("context",) if key == CALLBACKS else OF_COMPLETIONS)


def require_functions(evaluation: EvalConfig, rollout: RolloutConfig | None) -> None:
    """Raise ConfigError, as `function_of` does, unless every function that the sections name can be used."""
    paths: list[tuple[str, str | None]] = [(CALLBACKS, path) for path in evaluation.callbacks]
    if rollout is not None:
        paths += [(REWARD, rollout.reward), (ENVIRONMENT, rollout.environment)]
    for key, path in paths:
        if path is not None:
            function_of(key, path)
