"""The user's functions that the configuration names, and their calls for a run's completions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, EvalConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.section import function_hint
from stillhouse.config.servers import server_token
from stillhouse.data.media import MediaProcessor
from stillhouse.display import name_list
from stillhouse.parallel import log_rank0
from stillhouse.rollout.records import Sampling
from stillhouse.rollout.reward import RepeatedCall, RewardSum, WeightedCall
from stillhouse.rollout.samples import SourceSettings
from stillhouse.user_code.environment import Environment, environment_of
from stillhouse.user_code.function_calls import FunctionCalls
from stillhouse.user_code.function_state import has_state, state_text
from stillhouse.user_code.functions import (
    CALLBACKS,
    EVAL_REWARD,
    REWARD,
    REWARD_METHOD,
    UserFunction,
    gives_reward,
    load_function,
    require_synchronous,
)


def user_function(key: str, path: str, full_key: str | None = None) -> UserFunction:
    """Import a function (see `load_function`).

    key: the configuration key of this kind of function, such as `REWARD`.
    full_key: the key that the error names, or None if it is `key`.

    Raises ConfigError if the function cannot be used.
    """
    with as_config_error(full_key or key):
        return load_function(key, path, function_hint(path))


def loaded_functions(
    evaluation: EvalConfig,
    rollouts: Sequence[RolloutConfig],
    section: RolloutConfig | None,
    rollout_key: Callable[[int, str], str] = lambda _, key: f"rollout.{key}",
) -> list[UserFunction]:
    """Import the functions and classes of the user that these sections name, and return them.

    rollouts: the section rollout for each source of prompts.
    section: the section rollout of the configuration, or None for its defaults. The samples of eval.prompts have its
        environment and its tools.
    rollout_key: returns the full key, from the number of a source and a key of the section rollout.

    Raises ConfigError if a function cannot be used (see `load_function`), or has a state that a checkpoint cannot
    contain.
    """
    functions = [user_function(CALLBACKS, path) for path in evaluation.callbacks]
    for function in functions:
        _require_state(function, 0, CALLBACKS)
    if evaluation.prompts is not None:
        prompt_section = (section or RolloutConfig()).model_copy(update={"reward": evaluation.prompts.reward})
        functions += _functions_of(prompt_section, EVAL_REWARD, EVAL_REWARD, "rollout.{}".format)
    for number, rollout in enumerate(rollouts):
        full_key = partial(rollout_key, number)
        functions += _functions_of(rollout, REWARD, full_key("reward"), full_key)
    return functions


def _functions_of(
    rollout: RolloutConfig, reward_kind: str, reward_key: str, full_key: Callable[[str], str]
) -> list[UserFunction]:
    """Import the functions of one source of prompts, or of eval.prompts.

    reward_kind: the configuration key of this kind of reward, `REWARD` or `EVAL_REWARD`.
    reward_key: the full key of the rewards, for errors.
    full_key: returns the full key for a key of the section rollout.

    Raises the errors of `loaded_functions`.
    """
    environment = environment_of(rollout, full_key)
    rewards = [part.name for part in reward_parts(rollout.reward) if part.is_function]
    functions = [(user_function(reward_kind, path, reward_key), reward_key) for path in rewards]
    if environment is not None:
        key = full_key(environment.key.removeprefix("rollout."))
        functions += [(function, key) for function in environment.functions]
    for function, key in functions:
        _require_state(function, rollout.workers, key)
    if has_part_of_object(rollout.reward):
        with as_config_error(reward_key):
            _require_one_rewarding_class(environment)
    return [function for function, _ in functions]


def _require_state(function: UserFunction, workers: int, key: str) -> None:
    """Raise ConfigError for a state that a checkpoint cannot contain. key: the full key of the function."""
    with as_config_error(key):
        if not has_state(function):
            return
        state_text(function)
    if workers:
        raise ConfigError(
            "rollout.workers",
            f"got {workers}: expected 0, because {function} has a state (state_dict), and a checkpoint contains only "
            "states of the process of rank 0",
        )


def _require_one_rewarding_class(environment: Environment | None) -> None:
    """Raise ValueError unless a sample has one object that gives a reward."""
    key, functions = ("rollout", []) if environment is None else (environment.key, environment.functions)
    rewarding = [function for function in functions if gives_reward(function)]
    for function in rewarding:
        require_synchronous(f"{function.path}.{REWARD_METHOD}", getattr(function.function, REWARD_METHOD))
    if len(rewarding) != 1:
        several = f" ({name_list(function.path for function in rewarding)})" if rewarding else ""
        raise ValueError(
            f"got environment, but {len(rewarding)} classes in {key} have a method reward without arguments"
            f"{several}: expected one class (package.module:Class) whose reward() gives the reward of a sample"
        )


class CompletionCalls:
    """The calls of the rewards and the environments of a run. sources: the settings of each source of prompts.

    With `rollout.workers`, functions run in separate processes, with many calls at once. Otherwise they run in this
    process, in the thread that calls them, and their futures are done at once. A reward may also be a server.
    """

    def __init__(
        self,
        rollouts: Sequence[RolloutConfig],
        tokenizer: PreTrainedTokenizerBase,
        processor: MediaProcessor | None,
        samplings: Sequence[Sampling | None],
        *,
        reward_key: str = REWARD,
        compare_first: bool = False,
    ):
        """Start the workers, and open the reward servers.

        rollouts, samplings: the section rollout and the sampling settings for each source of prompts.
        reward_key: the key of the configuration that has the rewards.
        compare_first: whether the first call of each reward is repeated. A warning is printed if the results differ.
        """
        rollout, rewards = rollouts[0], [part for source in rollouts for part in reward_parts(source.reward)]
        environments = [environment_of(source) for source in rollouts]
        paths = [(reward_key, part.name) for part in rewards if part.is_function]
        paths += [(one.key, one.path) for one in environments if one is not None]
        paths = list(dict.fromkeys(paths))
        #: the calls of the user's functions; `_servers` has the calls of servers
        self.functions = FunctionCalls(paths, rollout.workers, rollout.worker_timeout, rollout.worker_memory)
        parts: dict[str, WeightedCall] = {}
        for path in (path for key, path in paths if key == reward_key):
            function = user_function(reward_key, path)
            compared = compare_first and not has_state(function)
            repeated = RepeatedCall(f"{reward_key}: {path}", warn) if compared else None
            parts[path] = WeightedCall(1.0, self.functions, reward_key, path, function.takes_turns, repeated)
        self._servers: list[Any] = []
        for part in dict.fromkeys(part._replace(weight=1.0) for part in rewards if part.is_server):
            variable = (rollout.reward_tokens or {}).get(part.server)
            token = None if variable is None else server_token(f"{reward_key}_tokens", variable)
            name = f"{reward_key}: {part.name}"
            self._servers.append(part.server_kind.open_reward(part.name, name, rollout.timeout, warn, token))
            repeated = RepeatedCall(name, warn) if compare_first else None
            parts[part.name] = WeightedCall(1.0, self._servers[-1], reward_key, part.name, True, repeated)
        self.sources: list[SourceSettings] = []
        for source, sampling, environment in zip(rollouts, samplings, environments, strict=True):
            rewards, replies = reward_parts(source.reward), None
            if environment is not None:
                replies = environment.replies(self.functions, tokenizer, processor, warn)
            weighted = [replace(parts.get(part.name, WeightedCall(1.0)), weight=part.weight) for part in rewards]
            has_functions = replies is not None or not all(part.is_server for part in rewards)
            has_calls = replies is not None or bool(rewards)
            self.sources.append(
                SourceSettings(
                    source.max_new_tokens,
                    sampling,
                    RewardSum(reward_key, weighted) if rewards else None,
                    replies,
                    calls_from_any_thread=has_calls and (self.functions.are_elsewhere or not has_functions),
                    max_turns=1 if replies is None else source.max_turns,
                    object_gives_reward=has_part_of_object(source.reward),
                )
            )

    def close(self) -> None:
        """End the worker processes and the requests to servers. Futures of open calls can remain pending forever."""
        self.functions.close()
        for server in self._servers:
            server.close()


def warn(line: str) -> None:
    """Print a warning on rank 0."""
    log_rank0(f"warning: {line}")
