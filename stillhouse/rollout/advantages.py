"""Computes advantages from rewards. The rewards are rescaled first, so that no sum or square of them overflows."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from stillhouse.rollout.records import Sample

#: which standard deviation of n rewards: "population" divides the sum of squares by n, "sample" by n − 1
Deviation = Literal["population", "sample"]

_LARGEST = float(np.finfo(np.float32).max)
#: cosines of equal vectors differ by up to four units in the last place
_UNITS = 4


def with_advantages(
    samples: Sequence[Sample], how: Literal["normalized", "centered"], deviation: Deviation = "population"
) -> list[Sample]:
    """Return the samples of one prompt with their advantages: the reward minus the mean reward of the prompt.
    "normalized" also divides by the standard deviation of these rewards (Shao et al. 2024, arXiv:2402.03300, section
    4.1.2), and gives 0 if `rewards_are_equal`. Advantages are 0 if the samples have no rewards.

    Raises ValueError for centered advantages that float32 cannot represent.
    """
    raw_rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not raw_rewards:
        return list(samples)
    assert len(raw_rewards) == len(samples)
    rewards, exponent = _scaled(raw_rewards)
    # the differences keep all digits of a small spread at a large reward; a mean of the rewards would not
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
            f"a prompt: with rollout.advantage=centered, expected differences below {_LARGEST:.2g}; normalized takes "
            "any"
        )
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ at most by the rounding of the dtype in which they were computed.

    It is float32 if all rewards are numbers of float32, as those of a model in float32 are, and float64 otherwise.
    Rewards that are all whole numbers, such as counts, have no rounding of float32.
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
    """Divide the rewards by a power of two, which is exact, so that none is above 1; also return its exponent."""
    exponent = math.frexp(max(map(abs, rewards)))[1]
    return [math.ldexp(reward, -exponent) for reward in rewards], exponent
