"""The calls of the user's functions and servers about a run's completions, for each source of prompts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, RolloutConfig
from stillhouse.config.data_section import source_prefix
from stillhouse.config.reward_sum import has_part_of_object, reward_parts
from stillhouse.config.servers import server_token
from stillhouse.data.media import MediaProcessor
from stillhouse.data.render.reply_format import ReplyFormat, generation_prompt, reply_format
from stillhouse.data.render.tool_format import ToolFormat, tool_format
from stillhouse.loops.session import Data, Models, RolloutPlan
from stillhouse.models import eos_ids
from stillhouse.parallel import log_rank0
from stillhouse.rollout import Sampling, SourceSettings
from stillhouse.rollout.reward import RepeatedCall, RewardPart, RewardSum
from stillhouse.rollout.turns import FunctionEpisodes, MessageReplies, TextReplies, ToolReplies, TurnReplies
from stillhouse.rollout.user_functions import loaded_tools, tool_schemas, user_function
from stillhouse.user_code.function_calls import FunctionCalls
from stillhouse.user_code.function_state import has_state
from stillhouse.user_code.functions import ENVIRONMENT, REWARD, TOOLS


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
        self._reward_key, self._tokenizer, self._processor = reward_key, tokenizer, processor
        self._tool_formats: dict[tuple[str, ...], ToolFormat] = {}
        #: of the user's functions, but not of servers
        self.functions = FunctionCalls(paths, rollout.workers, rollout.worker_timeout, rollout.worker_memory)
        parts: dict[str, RewardPart] = {}
        for path in (path for key, path in paths if key == reward_key):
            function = user_function(reward_key, path)
            compared = compare_first and not has_state(function)
            repeated = RepeatedCall(f"{reward_key}: {path}", warn) if compared else None
            parts[path] = RewardPart(1.0, self.functions, reward_key, path, function.takes_turns, repeated)
        self._servers: list[Any] = []
        for part in dict.fromkeys(part._replace(weight=1.0) for part in rewards if part.is_server):
            variable = (rollout.reward_tokens or {}).get(part.server)
            token = None if variable is None else server_token(f"{reward_key}_tokens", variable)
            name = f"{reward_key}: {part.name}"
            self._servers.append(part.server_kind.open_reward(part.name, name, rollout.timeout, warn, token))
            repeated = RepeatedCall(name, warn) if compare_first else None
            parts[part.name] = RewardPart(1.0, self._servers[-1], reward_key, part.name, True, repeated)
        self.sources = [
            self._settings(source, sampling, parts) for source, sampling in zip(rollouts, samplings, strict=True)
        ]

    def _settings(
        self, rollout: RolloutConfig, sampling: Sampling | None, parts: Mapping[str, RewardPart]
    ) -> SourceSettings:
        rewards = reward_parts(rollout.reward)
        weighted = [
            RewardPart(part.weight) if part.is_of_object else replace(parts[part.name], weight=part.weight)
            for part in rewards
        ]
        replies = self._turn_replies(rollout)
        has_functions = replies is not None or not all(part.is_server for part in rewards)
        has_calls = replies is not None or bool(rewards)
        return SourceSettings(
            rollout.max_new_tokens,
            sampling,
            RewardSum(self._reward_key, weighted) if rewards else None,
            replies,
            calls_from_any_thread=has_calls and (self.functions.are_elsewhere or not has_functions),
            max_turns=1 if replies is None else rollout.max_turns,
            object_gives_reward=has_part_of_object(rollout.reward),
        )

    def _turn_replies(self, rollout: RolloutConfig) -> TurnReplies | None:
        """What follows the turns of samples; None if they have one turn."""
        tokenizer, processor, path = self._tokenizer, self._processor, rollout.environment
        placeholders = [] if processor is None else processor.placeholder_ids
        tools, schemas = loaded_tools(rollout), tool_schemas(rollout)
        if tools is not None and schemas is not None:
            paths, have_state = tuple(rollout.tool_paths), tools.have_state
            if paths not in self._tool_formats:
                self._tool_formats[paths] = tool_format(tokenizer, schemas, processor)
            calls = FunctionEpisodes(self.functions, TOOLS, " ".join(paths), have_state=have_state)
            tokens = rollout.tool_tokens
            return ToolReplies(calls, self._tool_formats[paths], tokens, have_state=have_state, warn=warn)
        if path is None:
            return None
        is_class = inspect.isclass(user_function(ENVIRONMENT, path).function)
        calls = FunctionEpisodes(self.functions, ENVIRONMENT, path, is_class, is_class)
        if (role := rollout.reply_role) is not None:
            has_stops = bool(rollout.stop)
            return MessageReplies(calls, reply_format(tokenizer, role, processor), placeholders, has_stops=has_stops)
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


def require_end_of_turns(models: Models, data: Data, plan: RolloutPlan) -> None:
    """Raise ConfigError on all ranks if the student cannot end a turn with a call of a tool, or before a reply."""
    for number, rollout in enumerate(plan.configs):
        if rollout.writer == "student":
            require_end_of_turn(models, data, rollout, partial(source_prefix, plan.sources, number))


def require_end_of_turn(
    models: Models, data: Data, rollout: RolloutConfig, prefix: Callable[[str], str] = lambda key: ""
) -> None:
    """Raise ConfigError on all ranks if the student cannot end a turn. prefix: returns what precedes a key."""
    if rollout.stop:
        return
    if (schemas := tool_schemas(rollout)) is not None:
        key, what = "tools", "turns with calls"
        turn_format: ToolFormat | ReplyFormat = tool_format(data.tokenizer, schemas, data.media_processor)
    elif (role := rollout.reply_role) is not None:
        key, what = "reply", "turns"
        turn_format = reply_format(data.tokenizer, role, data.media_processor)
    else:
        return
    if turn_format.marker_id not in eos_ids(data.tokenizer, models.student):
        raise ConfigError(
            f"{prefix(key)}rollout.{key}",
            f"the chat template ends {what} with {turn_format.marker!r}, which is no end-of-sequence token of the "
            "student: expected it in eos_token_id of the student's generation_config.json, or in rollout.stop",
        )
