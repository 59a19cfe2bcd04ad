"""Rewards as advantages. Rewards may have any size that a float has: no sum or square of them overflows."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from stillhouse.generation.sample import Sample

#: the divisor of the squares' sum in a standard deviation of n numbers: n, or n − 1
Deviation = Literal["population", "sample"]

_LARGEST = float(np.finfo(np.float32).max)


def with_advantages(
    samples: Sequence[Sample], how: Literal["normalized", "centered"], deviation: Deviation = "population"
) -> list[Sample]:
    """One prompt's samples with their advantages. An advantage is the reward minus the mean; if "normalized", it is
    divided by the standard deviation of the rewards (Shao et al. 2024, arXiv:2402.03300, section 4.1.2). If all
    rewards are equal, and without rewards, advantages are 0.

    Raises ValueError for centered advantages that float32 cannot represent.
    """
    raw_rewards = [sample.reward for sample in samples if sample.reward is not None]
    if not raw_rewards:
        return list(samples)
    assert len(raw_rewards) == len(samples)
    rewards, exponent = _scaled(raw_rewards)
    mean = statistics.fmean(rewards)
    spread = (statistics.pstdev if deviation == "population" else statistics.stdev)(rewards)
    if spread <= 1e-6 * max(map(abs, rewards)):  # equal but for rounding
        advantages = [0.0 for _ in rewards]
    elif how == "normalized":
        advantages = [(reward - mean) / spread for reward in rewards]
    else:
        with np.errstate(over="ignore"):  # an advantage that is infinite is refused below
            advantages = np.ldexp(np.array(rewards) - mean, exponent).tolist()
    if max(map(abs, advantages)) > _LARGEST:
        raise ValueError(
            f"rollout.reward gives rewards from {min(raw_rewards):g} to {max(raw_rewards):g} for the completions of "
            f"a prompt: with rollout.advantage=centered, expected differences below {_LARGEST:.2g}; normalized takes "
            "any"
        )
    return [replace(sample, advantage=advantage) for sample, advantage in zip(samples, advantages, strict=True)]


def mean_and_deviation(rewards: Sequence[float]) -> tuple[float, float]:
    """The mean and the population's standard deviation of some rewards."""
    scaled, exponent = _scaled(rewards)
    return math.ldexp(statistics.fmean(scaled), exponent), math.ldexp(statistics.pstdev(scaled), exponent)


def _scaled(rewards: Sequence[float]) -> tuple[list[float], int]:
    """The rewards divided by a power of two, so that none is above 1, and its exponent. This changes no digit."""
    exponent = math.frexp(max(map(abs, rewards)))[1]
    return [math.ldexp(reward, -exponent) for reward in rewards], exponent
