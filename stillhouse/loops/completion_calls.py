"""Where the rewards and the environment of a run's completions are computed, and the calls that request them."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from stillhouse.config import RolloutConfig
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.server_tokens import server_token
from stillhouse.parallel import log_rank0
from stillhouse.rollout.advantages import rewards_are_equal
from stillhouse.rollout.user_functions import (
    CompletionCall,
    EnvironmentCall,
    Reward,
    RewardCall,
    called_here,
    done,
    environment_call,
    loaded_tools,
    reward_call,
    user_function,
)
from stillhouse.serving.client.reward_server import RewardServer
from stillhouse.user_code.episodes import Episodes
from stillhouse.user_code.function_state import has_state
from stillhouse.user_code.functions import ENVIRONMENT, REWARD, TOOLS, Turn, UserFunctionError, about_completion
from stillhouse.user_code.worker_pool import WorkerPool

#: after how many calls a reward's first one is repeated: a state that only the first one has made, such as a mean of
#: one number, may give the same number again
_REPEATED_AFTER = 8


class CallTimes:
    """The number of calls and their seconds, by the configuration keys of their functions; for several threads."""

    def __init__(self) -> None:
        self._lock, self._by_key = threading.Lock(), dict[str, tuple[int, float]]()

    def add(self, key: str, seconds: float) -> None:
        with self._lock:
            count, total = self._by_key.get(key, (0, 0.0))
            self._by_key[key] = count + 1, total + seconds

    def take(self) -> dict[str, tuple[int, float]]:
        """Return the numbers and the seconds since the last call of this method."""
        with self._lock:
            taken, self._by_key = self._by_key, {}
        return taken


@dataclass(frozen=True)
class SourceCalls:
    """The calls about completions of one source of prompts.

    tools: the calls of the source's tools, of which an `Episode` has the turns.
    tools_have_state: whether some of these tools have objects.
    run_elsewhere: whether the calls may be made from any thread, because they only start something elsewhere.
    """

    reward: RewardCall | None
    environment: EnvironmentCall | None
    tools: EnvironmentCall | None
    tools_have_state: bool
    run_elsewhere: bool


class CompletionCalls:
    """The rewards and the environments of a run's completions: where they run, and their calls.

    sources: the calls of each source of prompts.

    With `rollout.workers`, functions run in processes of their own, many calls at once. Otherwise they run in this
    process, in the thread that calls them, and their futures are done at once. A reward may also be a server.
    """

    def __init__(
        self,
        rollouts: Sequence[RolloutConfig],
        *,
        reward_key: str = REWARD,
        compare_first: bool = False,
    ):
        """rollouts: the section rollout for each source of prompts.
        reward_key: the key of the configuration that has the rewards. compare_first: whether the first call of each
        reward is repeated, to warn of one that does not depend on its arguments alone.
        """
        rollout, rewards = rollouts[0], [part for source in rollouts for part in reward_parts(source.reward)]
        paths, self._reward_key = worker_functions(rollouts, reward_key), reward_key
        functions = {(key, path): user_function(key, path) for key, path in paths if key != TOOLS}
        #: of calls in this process and in workers, but not of servers
        self.times = CallTimes()
        self._pool: WorkerPool | None = None
        if rollout.workers and paths:
            self._pool = WorkerPool(
                paths,
                rollout.workers,
                seconds=rollout.worker_timeout,
                memory_gib=rollout.worker_memory,
                add_seconds=self.times.add,
            )
        self._servers: list[RewardServer] = []
        calls = {
            name: self._timed(name[0], called_here(function)) if self._pool is None else self._pool.caller(*name)
            for name, function in functions.items()
        }
        parts: dict[str, CompletionCall] = {
            path: reward_call(function, calls[key, path])
            for (key, path), function in functions.items()
            if key == reward_key
        }
        for part in dict.fromkeys(part._replace(weight=1.0) for part in rewards if part.is_server):
            variable = (rollout.reward_tokens or {}).get(part.server)
            token = None if variable is None else server_token(f"{reward_key}_tokens", variable)
            server = RewardServer(part.name, f"{reward_key}: {part.name}", rollout.timeout, warn, token)
            self._servers.append(server)
            parts[part.name] = server.call
        environments = {
            path: environment_call(function, calls[key, path])
            for (key, path), function in functions.items()
            if key == ENVIRONMENT
        }
        tools = {tuple(source.tool_paths): self._of_tools(source) for source in rollouts if source.tool_paths}
        if compare_first:
            with_state = {path for (_, path), function in functions.items() if has_state(function)}
            for path in parts.keys() - with_state:
                parts[path] = compared_once(f"{reward_key}: {path}", parts[path])
        self.sources = [
            self._of_source(source, parts, environments, *tools.get(tuple(source.tool_paths), (None, False)))
            for source in rollouts
        ]

    def _of_tools(self, rollout: RolloutConfig) -> tuple[EnvironmentCall, bool]:
        """The calls of tools, and whether some of them have objects."""
        tools, paths = loaded_tools(rollout), " ".join(rollout.tool_paths)
        assert tools is not None
        if self._pool is not None:
            return self._pool.caller(TOOLS, paths), tools.have_state
        here = self._timed(TOOLS, Episodes(f"{TOOLS}: {paths}", tools.start, have_state=tools.have_state))
        return lambda *arguments: done(here(*arguments)), tools.have_state

    def _timed(self, key: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, which ends when it returns, with its seconds in `times`."""

        def timed(*arguments: Any) -> Any:
            started = time.monotonic()
            result = call(*arguments)
            self.times.add(key, time.monotonic() - started)
            return result

        return timed

    def _of_source(
        self,
        rollout: RolloutConfig,
        parts: Mapping[str, CompletionCall],
        environments: Mapping[str, EnvironmentCall],
        tools: EnvironmentCall | None,
        tools_have_state: bool,
    ) -> SourceCalls:
        rewards, environment = reward_parts(rollout.reward), rollout.environment
        has_functions = environment is not None or tools is not None or not all(part.is_server for part in rewards)
        weighted = [(part.weight, None if part.is_of_object else parts[part.name]) for part in rewards]
        return SourceCalls(
            weighted_sum(self._reward_key, weighted) if rewards else None,
            None if environment is None else environments[environment],
            tools,
            tools_have_state,
            run_elsewhere=self._pool is not None or not has_functions,
        )

    def close(self) -> None:
        """End the worker processes and the requests to servers; calls under way may never end."""
        if self._pool is not None:
            self._pool.close()
        for server in self._servers:
            server.close()


def worker_functions(rollouts: Sequence[RolloutConfig], reward_key: str = REWARD) -> list[tuple[str, str]]:
    """The functions of the user that workers call, as pairs of configuration key and path; see `answer_of`."""
    parts = [part for source in rollouts for part in reward_parts(source.reward)]
    paths = [(reward_key, part.name) for part in parts if part.is_function]
    paths += [(ENVIRONMENT, source.environment) for source in rollouts if source.environment is not None]
    paths += [(TOOLS, " ".join(source.tool_paths)) for source in rollouts if source.tool_paths]
    return list(dict.fromkeys(paths))


def weighted_sum(key: str, parts: Sequence[tuple[float, CompletionCall | None]]) -> RewardCall:
    """Return the call whose result is the sum of weight × result, added in the order of the parts.

    key: the key of the configuration that has the sum, for errors.
    parts: weights and calls; None in place of a call for the part that the sample's object gives.

    Of several parts that fail, the future raises the error of the first one.
    """

    def call(
        prompt: str,
        completion: str,
        record: Mapping[str, Any],
        source: str,
        turns: Sequence[Turn],
        of_object: Future[float] | None = None,
    ) -> Future[Reward]:
        of_parts = [
            of_object if part is None else part(prompt, completion, record, source, turns) for _, part in parts
        ]
        futures = [future for future in of_parts if future is not None]
        assert len(futures) == len(parts)
        total: Future[Reward] = Future()

        def add(results: Sequence[float]) -> Reward:
            value = sum(weight * result for (weight, _), result in zip(parts, results, strict=True))
            if not math.isfinite(value):
                about = about_completion(completion, source)
                raise UserFunctionError(f"{key}: the weighted sum is {value}{about}: expected a finite number")
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


def compared_once(name: str, call: CompletionCall) -> CompletionCall:
    """Return the same call, which also repeats its first one later, and warns if it gives another number then."""
    count, first_arguments, first = 0, tuple[Any, ...](), Future[Any]()

    def compared(*arguments: Any) -> Future[Any]:
        nonlocal count, first_arguments, first
        future, count = call(*arguments), count + 1
        if count == 1:
            first_arguments, first = arguments, future
        if count == _REPEATED_AFTER:
            try:
                again = call(*first_arguments)
            except UserFunctionError as error:
                again = Future()
                again.set_exception(error)
            # when both are done
            first.add_done_callback(lambda _: again.add_done_callback(lambda _: _compare(name, first, again)))
        return future

    return compared


def _compare(name: str, first: Future[Any], again: Future[Any]) -> None:
    if first.exception() is not None:
        return
    number, problem = first.result(), again.exception()
    if isinstance(problem, UserFunctionError):
        second = "later fails"
    elif problem is None and not rewards_are_equal([number, again.result()]):
        second = f"later {again.result():.6g}"
    else:
        return
    warn(
        f"{name} gives {number:.6g} and {second} for the same arguments: a reward that depends on anything else is "
        "another one when the run is resumed. A function with state_dict and load_state_dict keeps its state"
    )


def warn(line: str) -> None:
    """Print a warning on the first rank."""
    log_rank0(f"warning: {line}")
