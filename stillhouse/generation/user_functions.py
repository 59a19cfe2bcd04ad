"""The user's functions that the configuration names: how they are loaded, and where rewards and environments run."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from stillhouse.config import EvalConfig, RolloutConfig, as_config_error
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
from stillhouse.user_code.worker_pool import WorkerPool

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
        paths += [(REWARD, rollout.reward), (ENVIRONMENT, rollout.environment)]
    for key, path in paths:
        if path is not None:
            user_function(key, path)


class CompletionCalls:
    """The reward and the environment of a run's completions: where they run, and their calls.

    With `rollout.workers`, they run in processes of their own, many calls at once. Otherwise they run in this
    process, in the thread that calls them, and their futures are done at once.
    """

    def __init__(self, rollout: RolloutConfig):
        paths = {REWARD: rollout.reward, ENVIRONMENT: rollout.environment}
        functions = {key: user_function(key, path) for key, path in paths.items() if path is not None}
        self.pool: WorkerPool | None = None
        if rollout.workers and functions:
            self.pool = WorkerPool(
                [(key, function.path) for key, function in functions.items()],
                rollout.workers,
                seconds=rollout.worker_timeout,
                memory_gib=rollout.worker_memory,
            )
        self.reward, self.environment = (self._call(functions.get(key)) for key in (REWARD, ENVIRONMENT))

    @property
    def run_elsewhere(self) -> bool:
        """Whether the calls may be made from any thread, because they only start something elsewhere."""
        return self.pool is not None

    def close(self) -> None:
        """End the worker processes; calls under way never end."""
        if self.pool is not None:
            self.pool.close()

    def _call(self, function: UserFunction | None) -> CompletionCall | None:
        if function is None:
            return None
        if self.pool is not None:
            return self.pool.caller(function.key)
        return called_here(function)


def called_here(function: UserFunction) -> CompletionCall:
    """Return a call that runs the function at once, in the calling thread. Errors are raised by the call itself."""

    def call(prompt: str, completion: str, record: Mapping[str, Any], source: str) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(checked_call(function, prompt, completion, record, source))
        return future

    return call
