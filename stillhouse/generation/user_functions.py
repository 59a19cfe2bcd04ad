"""The user's functions that the configuration names."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from stillhouse.config import EvalConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.section import function_hint
from stillhouse.user_code.functions import (
    CALLBACKS,
    ENVIRONMENT,
    EVAL_REWARD,
    REWARD,
    UserFunction,
    checked_call,
    load_function,
)

#: computes something about a completion: called as call(prompt, completion, record, source). The future raises
#: ValueError for a call that fails. source: `file:line` of the record
CompletionCall = Callable[[str, str, Mapping[str, Any], str], Future[Any]]


def user_function(key: str, path: str) -> UserFunction:
    """Import a function (see `load_function`). Raises ConfigError if it cannot be used."""
    with as_config_error(key):
        return load_function(key, path, function_hint(path))


def require_functions(evaluation: EvalConfig, rollout: RolloutConfig | None) -> None:
    """Raise ConfigError if a function that these sections name cannot be used (see `load_function`)."""
    paths: list[tuple[str, str | None]] = [(CALLBACKS, path) for path in evaluation.callbacks]
    if evaluation.prompts is not None:
        paths.append((EVAL_REWARD, evaluation.prompts.reward))
    if rollout is not None:
        paths += [(REWARD, part.name) for part in reward_parts(rollout.reward) if not part.is_server]
        paths.append((ENVIRONMENT, rollout.environment))
    for key, path in paths:
        if path is not None:
            user_function(key, path)


def called_here(function: UserFunction) -> CompletionCall:
    """Return a call that runs the function at once, in the calling thread. Errors are raised by the call itself."""

    def call(prompt: str, completion: str, record: Mapping[str, Any], source: str) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(checked_call(function, prompt, completion, record, source))
        return future

    return call
