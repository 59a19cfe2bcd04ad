"""The calls of the user's functions and servers about a run's completions."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.servers import server_token
from stillhouse.parallel import log_rank0
from stillhouse.rollout.reward import FunctionPart, RepeatedPart, RewardPart, RewardSum
from stillhouse.rollout.turns import FunctionEpisodes
from stillhouse.rollout.user_functions import loaded_tools, user_function
from stillhouse.user_code.function_calls import FunctionCalls
from stillhouse.user_code.function_state import has_state
from stillhouse.user_code.functions import ENVIRONMENT, REWARD, TOOLS


@dataclass(frozen=True)
class SourceCalls:
    """The calls about completions of one source of prompts.

    run_elsewhere: whether the calls may be made from any thread, because they only start something elsewhere.
    """

    reward: RewardSum | None
    environment: FunctionEpisodes | None
    tools: FunctionEpisodes | None
    run_elsewhere: bool


class CompletionCalls:
    """The rewards and the environments of a run's completions. sources: the calls of each source of prompts.

    With `rollout.workers`, functions run in processes of their own, many calls at once. Otherwise they run in this
    process, in the thread that calls them, and their futures are done at once. A reward may also be a server.
    """

    def __init__(self, rollouts: Sequence[RolloutConfig], *, reward_key: str = REWARD, compare_first: bool = False):
        """rollouts: the section rollout for each source of prompts. reward_key: the key of the configuration that has
        the rewards. compare_first: whether the first call of each reward is repeated, to warn of one that does not
        depend on its arguments alone.
        """
        rollout, rewards = rollouts[0], [part for source in rollouts for part in reward_parts(source.reward)]
        paths = [(reward_key, part.name) for part in rewards if part.is_function]
        paths += [(ENVIRONMENT, source.environment) for source in rollouts if source.environment is not None]
        paths += [(TOOLS, " ".join(source.tool_paths)) for source in rollouts if source.tool_paths]
        paths = list(dict.fromkeys(paths))
        self._reward_key = reward_key
        #: of the user's functions, but not of servers
        self.functions = FunctionCalls(paths, rollout.workers, rollout.worker_timeout, rollout.worker_memory)
        parts: dict[str, RewardPart] = {}
        for path in (path for key, path in paths if key == reward_key):
            function = user_function(reward_key, path)
            parts[path] = FunctionPart(self.functions, reward_key, path, function.takes_turns)
            if compare_first and not has_state(function):
                parts[path] = RepeatedPart(f"{reward_key}: {path}", parts[path], warn)
        self._servers: list[Any] = []
        for part in dict.fromkeys(part._replace(weight=1.0) for part in rewards if part.is_server):
            variable = (rollout.reward_tokens or {}).get(part.server)
            token = None if variable is None else server_token(f"{reward_key}_tokens", variable)
            name = f"{reward_key}: {part.name}"
            self._servers.append(part.server_kind.open_reward(part.name, name, rollout.timeout, warn, token))
            parts[part.name] = self._servers[-1]
            if compare_first:
                parts[part.name] = RepeatedPart(name, parts[part.name], warn)
        self.sources = [self._source_calls(source, parts) for source in rollouts]

    def _source_calls(self, rollout: RolloutConfig, parts: Mapping[str, RewardPart]) -> SourceCalls:
        rewards, path, tools = reward_parts(rollout.reward), rollout.environment, loaded_tools(rollout)
        has_functions = path is not None or tools is not None or not all(part.is_server for part in rewards)
        weighted = [(part.weight, None if part.is_of_object else parts[part.name]) for part in rewards]
        environment = episodes = None
        if path is not None:
            is_class = inspect.isclass(user_function(ENVIRONMENT, path).function)
            environment = FunctionEpisodes(self.functions, ENVIRONMENT, path, is_class, is_class)
        if tools is not None:
            paths = " ".join(rollout.tool_paths)
            episodes = FunctionEpisodes(self.functions, TOOLS, paths, have_state=tools.have_state)
        return SourceCalls(
            RewardSum(self._reward_key, weighted) if rewards else None,
            environment,
            episodes,
            run_elsewhere=self.functions.are_elsewhere or not has_functions,
        )

    def close(self) -> None:
        """End the worker processes and the requests to servers; calls under way may never end."""
        self.functions.close()
        for server in self._servers:
            server.close()


def warn(line: str) -> None:
    """Print a warning on the first rank."""
    log_rank0(f"warning: {line}")
