"""Where the rewards and the environment of a run's completions are computed, and the calls that request them."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import reward_parts
from stillhouse.generation.user_functions import (
    CompletionCall,
    EnvironmentCall,
    Reward,
    RewardCall,
    called_here,
    done,
    environment_call,
    loaded_tools,
    user_function,
)
from stillhouse.parallel import log_rank0
from stillhouse.serving.client.reward_server import RewardServer
from stillhouse.user_code.episodes import Episodes
from stillhouse.user_code.functions import ENVIRONMENT, REWARD, TOOLS, UserFunctionError, about_completion
from stillhouse.user_code.worker_pool import WorkerHost, WorkerPool


@dataclass(frozen=True)
class SourceCalls:
    """The calls about completions of one source of prompts.

    run_elsewhere: whether the calls may be made from any thread, because they only start something elsewhere.
    """

    reward: RewardCall | None
    environment: EnvironmentCall | None
    run_elsewhere: bool


class CompletionCalls:
    """The rewards and the environments of a run's completions: where they run, and their calls.

    sources: the calls of each source of prompts.

    With `rollout.workers`, functions run in processes of their own, many calls at once. Otherwise they run in this
    process, in the thread that calls them, and their futures are done at once. A reward may also be a server.
    """

    def __init__(self, rollouts: Sequence[RolloutConfig], hosts: Sequence[WorkerHost] = ()):
        """rollouts: the section rollout for each source of prompts. hosts: other hosts with workers."""
        rollout, rewards = rollouts[0], [part for source in rollouts for part in reward_parts(source.reward)]
        paths = worker_functions(rollouts)
        tools, tool_paths = loaded_tools(rollout), " ".join(rollout.tool_paths)
        functions = {(key, path): user_function(key, path) for key, path in paths if key != TOOLS}
        self._pool: WorkerPool | None = None
        if rollout.workers and paths:
            self._pool = WorkerPool(
                paths,
                rollout.workers,
                seconds=rollout.worker_timeout,
                memory_gib=rollout.worker_memory,
                hosts=hosts,
                warn=warn,
            )
        self._servers: list[RewardServer] = []
        calls: dict[tuple[str, str], Callable[..., Future[Any]]] = {
            name: called_here(function) if self._pool is None else self._pool.caller(*name)
            for name, function in functions.items()
        }
        for name in dict.fromkeys(part.name for part in rewards if part.is_server):
            server = RewardServer(name, f"{REWARD}: {name}", rollout.timeout, warn)
            self._servers.append(server)
            calls[REWARD, name] = server.call
        environments = {
            path: environment_call(function, calls[key, path])
            for (key, path), function in functions.items()
            if key == ENVIRONMENT
        }
        #: the calls of tools, of which an `Episode` has the turns; the same for all sources
        self.tools: EnvironmentCall | None = None
        if tools is not None:
            here = Episodes(f"{TOOLS}: {tool_paths}", tools.start, have_state=tools.have_state)
            self.tools = (
                (lambda *arguments: done(here(*arguments)))
                if self._pool is None
                else self._pool.caller(TOOLS, tool_paths)
            )
        self.tools_have_state = tools is not None and tools.have_state
        self.sources = [self._of_source(source, calls, environments) for source in rollouts]

    def _of_source(
        self,
        rollout: RolloutConfig,
        calls: Mapping[tuple[str, str], Callable[..., Future[Any]]],
        environments: Mapping[str, EnvironmentCall],
    ) -> SourceCalls:
        rewards, environment = reward_parts(rollout.reward), rollout.environment
        has_functions = (
            environment is not None or self.tools is not None or not all(part.is_server for part in rewards)
        )
        return SourceCalls(
            weighted_sum([(part.weight, calls[REWARD, part.name]) for part in rewards]) if rewards else None,
            None if environment is None else environments[environment],
            run_elsewhere=self._pool is not None or not has_functions,
        )

    def close(self) -> None:
        """End the worker processes and the requests to servers; calls under way may never end."""
        if self._pool is not None:
            self._pool.close()
        for server in self._servers:
            server.close()


def worker_functions(rollouts: Sequence[RolloutConfig]) -> list[tuple[str, str]]:
    """The functions of the user that workers call, as pairs of configuration key and path; see `answer_of`."""
    parts = [part for source in rollouts for part in reward_parts(source.reward)]
    paths = [(REWARD, part.name) for part in parts if not part.is_server]
    paths += [(ENVIRONMENT, source.environment) for source in rollouts if source.environment is not None]
    paths += [(TOOLS, " ".join(rollouts[0].tool_paths))] if rollouts[0].tool_paths else []
    return list(dict.fromkeys(paths))


def weighted_sum(parts: Sequence[tuple[float, CompletionCall]]) -> RewardCall:
    """Return the call whose result is the sum of weight × result, added in the order of the parts.

    Of several parts that fail, the future raises the error of the first one.
    """

    def call(prompt: str, completion: str, record: Mapping[str, Any], source: str) -> Future[Reward]:
        futures = [part(prompt, completion, record, source) for _, part in parts]
        total: Future[Reward] = Future()

        def add(results: Sequence[float]) -> Reward:
            value = sum(weight * result for (weight, _), result in zip(parts, results, strict=True))
            if not math.isfinite(value):
                about = about_completion(completion, source)
                raise UserFunctionError(f"{REWARD}: the weighted sum is {value}{about}: expected a finite number")
            return Reward(float(value), tuple(results) if len(parts) > 1 else ())

        _when_all_done(futures, total, add)
        return total

    return call


def _when_all_done(
    futures: Sequence["Future[float]"], total: "Future[Reward]", add: Callable[[Sequence[float]], Reward]
) -> None:
    """Set `total` to add(results) or to the first error, as soon as all futures are done."""
    lock, missing = threading.Lock(), len(futures)

    def count(_: "Future[float]") -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        error = next((error for future in futures if (error := future.exception()) is not None), None)
        try:
            if error is None:
                total.set_result(add([future.result() for future in futures]))
        except UserFunctionError as problem:
            error = problem
        if error is not None:
            total.set_exception(error)

    for future in futures:
        future.add_done_callback(count)


def warn(line: str) -> None:
    """Print a warning on the first rank."""
    log_rank0(f"warning: {line}")
