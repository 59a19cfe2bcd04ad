"""The user's functions that the configuration names, and their calls about a run's completions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from stillhouse.config import ConfigError, EvalConfig, RolloutConfig, as_config_error
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.section import function_hint
from stillhouse.config.servers import server_token
from stillhouse.data.media import MediaProcessor
from stillhouse.data.render.reply_format import ReplyFormat, generation_prompt
from stillhouse.data.render.tool_format import ToolFormat
from stillhouse.display import first_line, name_list
from stillhouse.parallel import log_rank0
from stillhouse.rollout.records import Sampling
from stillhouse.rollout.reward import RepeatedCall, RewardSum, WeightedCall
from stillhouse.rollout.samples import SourceSettings
from stillhouse.rollout.turns import EpisodeCalls, MessageReplies, TextReplies, ToolReplies, TurnReplies
from stillhouse.user_code.episodes import Tools
from stillhouse.user_code.function_calls import FunctionCalls
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
    """Import a function (see `load_function`). Raises ConfigError if it cannot be used. full_key: the key for this
    error; None: `key`, which is the kind of the function.
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


def tool_schemas(rollout: RolloutConfig | None, key: str = TOOLS) -> list[dict[str, Any]] | None:
    """The schemas of the tools, which chat templates read; None without tools. key: see `loaded_tools`. Raises
    ConfigError for a tool without the types and descriptions that its schema needs.
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
    tools = loaded_tools(rollout, full_keys[TOOLS])
    functions = [] if tools is None else [*tools.functions.values(), *tools.classes]
    paths = [(reward_key, part.name) for part in reward_parts(rollout.reward) if part.is_function]
    paths += [] if rollout.environment is None else [(ENVIRONMENT, rollout.environment)]
    functions += [user_function(kind, path, full_keys[kind]) for kind, path in paths]
    for function in functions:
        _require_state(function, rollout.workers, full_keys[function.key])
    if has_part_of_object(rollout.reward):
        with as_config_error(full_keys[reward_key]):
            _require_one_rewarding_class(functions, ENVIRONMENT if rollout.environment is not None else TOOLS)
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


def _require_one_rewarding_class(functions: Sequence[UserFunction], key: str) -> None:
    """Raise ValueError unless a sample has one object that gives a reward. key: the kind of its class."""
    rewarding = {
        of.path: getattr(of.function, REWARD_METHOD) for of in functions if of.key == key and gives_reward(of)
    }
    for path, method in rewarding.items():
        require_synchronous(f"{path}.{REWARD_METHOD}", method)
    if len(rewarding) != 1:
        several = f" ({name_list(rewarding)})" if rewarding else ""
        raise ValueError(
            f"got environment, but {len(rewarding)} classes in {key} have a method reward without arguments"
            f"{several}: expected one class (package.module:Class), whose reward() gives the reward of its sample"
        )


class CompletionCalls:
    """The rewards and the environments of a run's completions. sources: the settings of each source of prompts.

    With `rollout.workers`, functions run in processes of their own, many calls at once. Otherwise they run in this
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
        """rollouts, samplings: the section rollout, and how tokens are sampled, for each source of prompts.
        reward_key: the key of the configuration that has the rewards. compare_first: whether the first call of each
        reward is repeated, to warn of one that does not depend on its arguments alone.
        """
        rollout, rewards = rollouts[0], [part for source in rollouts for part in reward_parts(source.reward)]
        paths = [(reward_key, part.name) for part in rewards if part.is_function]
        paths += [(ENVIRONMENT, source.environment) for source in rollouts if source.environment is not None]
        paths += [(TOOLS, " ".join(source.tool_paths)) for source in rollouts if source.tool_paths]
        paths = list(dict.fromkeys(paths))
        self._tokenizer, self._processor = tokenizer, processor
        self._tool_formats: dict[tuple[str, ...], ToolFormat] = {}
        #: of the user's functions, but not of servers
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
        for source, sampling in zip(rollouts, samplings, strict=True):
            rewards, replies = reward_parts(source.reward), self._turn_replies(source)
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

    def _turn_replies(self, rollout: RolloutConfig) -> TurnReplies | None:
        """What follows the turns of samples; None if they have one turn."""
        tokenizer, processor, path = self._tokenizer, self._processor, rollout.environment
        placeholders = [] if processor is None else processor.placeholder_ids
        tools, schemas = loaded_tools(rollout), tool_schemas(rollout)
        if tools is not None and schemas is not None:
            paths, have_state = tuple(rollout.tool_paths), tools.have_state
            if paths not in self._tool_formats:
                self._tool_formats[paths] = ToolFormat(tokenizer, schemas, processor)
            calls = EpisodeCalls(self.functions, TOOLS, " ".join(paths))
            tokens = rollout.tool_tokens
            return ToolReplies(calls, self._tool_formats[paths], tokens, have_state=have_state, warn=warn)
        if path is None:
            return None
        is_class = inspect.isclass(user_function(ENVIRONMENT, path).function)
        calls = EpisodeCalls(self.functions, ENVIRONMENT, path, is_class)
        if (role := rollout.reply_role) is not None:
            has_stops = bool(rollout.stop)
            return MessageReplies(calls, ReplyFormat(tokenizer, role, processor), placeholders, has_stops=has_stops)
        prompt = generation_prompt(tokenizer, processor)
        return TextReplies(calls, tokenizer, placeholders, prompt=prompt, warn=warn)

    def close(self) -> None:
        """End the worker processes and the requests to servers; calls under way may never end."""
        self.functions.close()
        for server in self._servers:
            server.close()


def warn(line: str) -> None:
    """Print a warning on the first rank."""
    log_rank0(f"warning: {line}")
