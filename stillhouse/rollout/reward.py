"""The reward of a completion, and its advantage over the other completions of its prompt.

A reward is a weighted sum of parts. A part comes from a function of the user, a server, or the sample's object in the
environment.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from stillhouse.rollout.records import Sample
from stillhouse.rollout.turns import Calls
from stillhouse.user_code.functions import Turn, UserFunctionError, about_completion

#: the first call of a reward is repeated after this number of calls. Directly after its first call, a reward with a
#: state, such as a running mean, could still give the same number again
_REPEATED_AFTER = 8


class RepeatedCall:
    """Repeats the first call for one part of the reward, and warns if the result differs. name: for the warning."""

    def __init__(self, name: str, warn: Callable[[str], None]):
        self._name, self._warn, self._count = name, warn, 0
        self._first_arguments, self._futures = tuple[Any, ...](), list[Future[Any]]()

    def add(self, part: "WeightedCall", arguments: tuple[Any, ...], future: Future[Any]) -> None:
        """Count a call of the part. When `_REPEATED_AFTER` calls were made, repeat the first call."""
        self._count += 1
        if self._count == 1:
            self._first_arguments, self._futures = arguments, [future]
        if self._count == _REPEATED_AFTER:
            assert part.calls is not None
            try:
                again = part.calls.request(part.key, part.path, *self._first_arguments)
            except UserFunctionError as error:
                again = Future()
                again.set_exception(error)
            self._futures.append(again)

    def compare(self) -> None:
        """Warn, at most once, if the first call and its repetition are done and their results differ."""
        if len(self._futures) < 2 or not all(future.done() for future in self._futures):
            return
        (first, again), self._futures = self._futures, []
        if first.exception() is not None:
            return
        number, problem = first.result(), again.exception()
        if isinstance(problem, UserFunctionError):
            second = "later fails"
        elif problem is None and not rewards_are_equal([number, again.result()]):
            second = f"later {again.result():.6g}"
        else:
            return
        self._warn(
            f"{self._name} gives {number:.6g} and {second} for the same arguments: a reward that depends on more "
            "than its arguments can change when the run is resumed. If the function has a state, give it state_dict "
            "and load_state_dict, so that checkpoints keep the state"
        )


@dataclass(frozen=True)
class WeightedCall:
    """A part of a reward, and the call that computes it.

    calls: makes the call of the user's function or server, or None if the sample's object in the environment gives
        the part.
    key, path: the arguments of the call that name the function or the server (see `Calls`).
    takes_turns: whether the call has an argument for the turns.
    repeated: repeats the first call. If it is None, no call is repeated.
    """

    weight: float
    calls: Calls | None = None
    key: str = ""
    path: str = ""
    takes_turns: bool = False
    repeated: RepeatedCall | None = None


@dataclass(frozen=True)
class RewardSum:
    """The sum of weight × result, added in the order of the parts. key: the key of the configuration, for errors."""

    key: str
    parts: Sequence[WeightedCall]

    def request(
        self,
        prompt: str,
        completion: str,
        record: Mapping[str, Any],
        source: str,
        turns: Sequence[Turn],
        object_reward: Future[float] | None = None,
    ) -> "PendingReward":
        """Request the reward of a completion. A function in this process raises UserFunctionError at once.

        source: `file:line` of the record.
        turns: the turns and the replies of the completion, in their order.
        object_reward: the part that the sample's object gives.
        """
        futures = []
        for part in self.parts:
            if part.calls is None:
                assert object_reward is not None
                futures.append(object_reward)
                continue
            arguments = (prompt, completion, record, source, *([turns] if part.takes_turns else []))
            futures.append(part.calls.request(part.key, part.path, *arguments))
            if part.repeated is not None:
                part.repeated.add(part, arguments, futures[-1])
        return PendingReward(self, futures, completion, source)

    def compare_repeated(self) -> None:
        """Warn about parts that have given different numbers for the same arguments (see `RepeatedCall`)."""
        for part in self.parts:
            if part.repeated is not None:
                part.repeated.compare()


@dataclass(frozen=True)
class PendingReward:
    """A requested reward. futures: the results of the reward's parts, in the order of the parts."""

    sum: RewardSum
    futures: Sequence[Future[float]]
    completion: str
    source: str

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self.futures)

    def added_to(self, sample: Sample) -> Sample:
        """The sample with its reward. All parts must be done. Raises the error of the first part that has failed."""
        self.sum.compare_repeated()
        results = [future.result() for future in self.futures]
        value = sum(part.weight * result for part, result in zip(self.sum.parts, results, strict=True))
        if not math.isfinite(value):
            about = about_completion(self.completion, self.source)
            raise UserFunctionError(f"{self.sum.key}: the weighted sum is {value}{about}: expected a finite number")
        return replace(sample, reward=float(value), reward_parts=tuple(results) if len(results) > 1 else ())


#: the standard deviation of n rewards: "population" divides the sum of squares by n, "sample" by n − 1
Deviation = Literal["population", "sample"]

_LARGEST = float(np.finfo(np.float32).max)
#: rewards that differ by at most this many units in the last place are equal; cosines of equal vectors differ by up
#: to four units
_UNITS = 4


def with_advantages(
    samples: Sequence[Sample], how: Literal["normalized", "centered"], deviation: Deviation = "population"
) -> list[Sample]:
    """Return the samples of one prompt with their advantages: the reward minus the mean reward of the prompt.

    With "normalized", the difference is divided by the standard deviation of these rewards (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2), or the advantage is 0 if `rewards_are_equal`. Samples without rewards are
    returned without a change.

    Raises ValueError for centered advantages that float32 cannot represent.
    """
    raw_rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not raw_rewards:
        return list(samples)
    assert len(raw_rewards) == len(samples)
    rewards, exponent = _scaled(raw_rewards)
    # if rewards are large and almost equal, their mean would lose digits of the advantages; differences keep them
    differences = [reward - rewards[0] for reward in rewards]
    mean = statistics.fmean(differences)
    centered = [difference - mean for difference in differences]
    if how == "centered":
        with np.errstate(over="ignore"):  # an infinite advantage raises ValueError below
            advantages = np.ldexp(centered, exponent).tolist()
    elif rewards_are_equal(raw_rewards):
        advantages = [0.0 for _ in centered]
    else:
        spread = (statistics.pstdev if deviation == "population" else statistics.stdev)(centered)
        advantages = [difference / spread for difference in centered]
    if max(map(abs, advantages)) > _LARGEST:
        raise ValueError(
            f"rollout.reward gives rewards from {min(raw_rewards):g} to {max(raw_rewards):g} for the completions of "
            f"a prompt: with rollout.advantage=centered, expected differences below {_LARGEST:.2g}. "
            "rollout.advantage=normalized accepts all finite rewards"
        )
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ at most by the rounding of the dtype in which they were computed.

    If float32 can represent all rewards exactly, the dtype is assumed to be float32, the dtype of many reward models.
    Otherwise, and if all rewards are whole numbers, such as counts, it is assumed to be float64.
    """
    with np.errstate(over="ignore"):
        is_of_float32 = all(float(np.float32(reward)) == reward for reward in rewards)
    are_whole = all(float(reward).is_integer() for reward in rewards)
    dtype = np.float32 if is_of_float32 and not are_whole else np.float64
    return max(rewards) - min(rewards) <= _UNITS * float(np.finfo(dtype).eps) * max(map(abs, rewards))


def mean_and_deviation(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean and the population standard deviation of rewards."""
    scaled, exponent = _scaled(rewards)
    return math.ldexp(statistics.fmean(scaled), exponent), math.ldexp(statistics.pstdev(scaled), exponent)


def _scaled(rewards: Sequence[float]) -> tuple[list[float], int]:
    """Divide the rewards by a power of two, which is exact, so that all absolute values are below 1. Also returns the
    exponent of the power.
    """
    exponent = math.frexp(max(map(abs, rewards)))[1]
    return [math.ldexp(reward, -exponent) for reward in rewards], exponent
