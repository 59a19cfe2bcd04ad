"""The user's functions that the configuration names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from stillhouse.config import ConfigError, EvalConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.section import function_hint
from stillhouse.display import first_line, name_list
from stillhouse.user_code.episodes import Tools
from stillhouse.user_code.function_state import has_state, state_text
from stillhouse.user_code.functions import (
    CALLBACKS,
    ENVIRONMENT,
    EVAL_REWARD,
    REWARD,
    REWARD_METHOD,
    TOOLS,
    UserFunction,
    gives_reward,
    load_function,
    require_synchronous,
)


def user_function(key: str, path: str, full_key: str | None = None) -> UserFunction:
    """Import a function (see `load_function`). Raises ConfigError if it cannot be used.

    full_key: the key for this error; None: `key`, which is the kind of the function.
    """
    with as_config_error(full_key or key):
        return load_function(key, path, function_hint(path))


def loaded_tools(rollout: RolloutConfig, key: str = TOOLS) -> Tools | None:
    """Import the tools of a source of prompts; None without tools. Raises ConfigError for one that cannot be used.

    key: the full key of these tools, for errors.
    """
    if not rollout.tool_paths:
        return None
    with as_config_error(key):
        return Tools(rollout.tool_paths, function_hint)


def tool_functions(tools: Tools | None) -> list[UserFunction]:
    """The functions and classes of the user that have these tools."""
    return [] if tools is None else [*tools.functions.values(), *tools.classes]


def tool_schemas(rollout: RolloutConfig | None, key: str = TOOLS) -> list[dict[str, Any]] | None:
    """The schemas of the tools, which chat templates read; None without tools. key: see `loaded_tools`.

    Raises ConfigError for a tool without the types and descriptions that its schema needs.
    """
    if rollout is None or (tools := loaded_tools(rollout, key)) is None:
        return None
    schemas = []
    for name, described in tools.described.items():
        try:
            schemas.append(get_json_schema(described))
        except (TypeHintParsingException, DocstringParsingException, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(key, f"{name} has no description that a model can read: {first_line(error)}") from error
    return schemas


def loaded_functions(
    evaluation: EvalConfig,
    rollouts: Sequence[RolloutConfig],
    section: RolloutConfig | None,
    rollout_key: Callable[[int, str], str] = lambda _, key: f"rollout.{key}",
) -> list[UserFunction]:
    """Import the functions and classes of the user that these sections name, and return them.

    Raises ConfigError if one cannot be used (see `load_function`), or has a state that a checkpoint cannot have.

    rollouts: the section rollout for each source of prompts. rollout_key: returns the full key of a source's key.
    section: the section rollout itself, whose turns eval.prompts has.
    """
    functions = [user_function(CALLBACKS, path) for path in evaluation.callbacks]
    for function in functions:
        _require_state(function, 0, CALLBACKS)
    if evaluation.prompts is not None:
        prompt_section = (section or RolloutConfig()).model_copy(update={"reward": evaluation.prompts.reward})
        functions += _functions_of(
            prompt_section, EVAL_REWARD, {key: key for key in (EVAL_REWARD, ENVIRONMENT, TOOLS)}
        )
    for number, rollout in enumerate(rollouts):
        keys = {key: rollout_key(number, key.removeprefix("rollout.")) for key in (REWARD, ENVIRONMENT, TOOLS)}
        functions += _functions_of(rollout, REWARD, keys)
    return functions


def _functions_of(rollout: RolloutConfig, reward_key: str, full_keys: Mapping[str, str]) -> list[UserFunction]:
    """The functions of one source of prompts, or of eval.prompts. Raises the errors of `loaded_functions`.

    reward_key: the kind of its rewards. full_keys: the full keys of rewards, environment and tools, by their kinds.
    """
    functions = tool_functions(loaded_tools(rollout, full_keys[TOOLS]))
    paths = [(reward_key, part.name) for part in reward_parts(rollout.reward) if part.is_function]
    paths += [] if rollout.environment is None else [(ENVIRONMENT, rollout.environment)]
    functions += [user_function(kind, path, full_keys[kind]) for kind, path in paths]
    for function in functions:
        _require_state(function, rollout.workers, full_keys[function.key])
    if has_part_of_object(rollout.reward):
        with as_config_error(full_keys[reward_key]):
            _require_one_rewarding_class(rollout)
    return functions


def _require_state(function: UserFunction, workers: int, key: str) -> None:
    """Raise ConfigError for a function with a state that a checkpoint cannot have. key: its full key"""
    with as_config_error(key):
        if not has_state(function):
            return
        state_text(function)
    if workers:
        raise ConfigError(
            "rollout.workers",
            f"got {workers}: expected 0, because {function} has a state (state_dict), and a checkpoint has that of "
            "the process of rank 0 alone",
        )


def _require_one_rewarding_class(rollout: RolloutConfig) -> None:
    """Raise ValueError unless a sample has one object that gives a reward. The functions can be used."""
    if rollout.environment is None:
        tools = loaded_tools(rollout)
        classes, key = [] if tools is None else tools.classes, TOOLS
    else:
        classes, key = [user_function(ENVIRONMENT, rollout.environment)], ENVIRONMENT
    rewarding = {of.path: getattr(of.function, REWARD_METHOD) for of in classes if gives_reward(of)}
    for path, method in rewarding.items():
        require_synchronous(f"{path}.{REWARD_METHOD}", method)
    if len(rewarding) != 1:
        several = f" ({name_list(rewarding)})" if rewarding else ""
        raise ValueError(
            f"got environment, but {len(rewarding)} classes in {key} have a method reward without arguments"
            f"{several}: expected one class (package.module:Class), whose reward() gives the reward of its sample"
        )
