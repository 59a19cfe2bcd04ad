"""Statistics of a step's samples: turns, calls of tools, and prompts whose rewards are all equal."""

import statistics
from collections.abc import Iterable, Sequence

from stillhouse.config import RolloutConfig
from stillhouse.rollout import PromptPlan, Sample
from stillhouse.rollout.reward import rewards_are_equal


def has_turns(rollout: RolloutConfig) -> bool:
    """Whether samples of a source of prompts may have several turns."""
    return rollout.environment is not None or bool(rollout.tool_paths)


def turn_statistics(samples: Sequence[Sample], rollouts: Iterable[RolloutConfig]) -> dict[str, float]:
    """Return `turns` and `tool_calls` per sample, and `tool_errors` per call.

    The last one is absent if nothing is called. Empty for samples that cannot have several turns.

    rollouts: the sections rollout of the samples' sources.
    """
    rollouts = list(rollouts)
    if not any(map(has_turns, rollouts)):
        return {}
    values = {"turns": statistics.fmean(sample.turns for sample in samples)}
    if any(rollout.tool_paths for rollout in rollouts):
        calls = sum(sample.tool_calls for sample in samples)
        values["tool_calls"] = calls / len(samples)
        if calls:
            values["tool_errors"] = sum(sample.tool_errors for sample in samples) / calls
    return values


def equal_rewards(samples: Sequence[Sample], plan: PromptPlan) -> dict[str, float]:
    """Return `equal_rewards`: the share of prompts whose rewards are all equal, so that they give no signal.

    Empty for samples without rewards.
    """
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if sample.reward is not None:
            rewards.setdefault(plan.group_of(sample.number), []).append(sample.reward)
    if not rewards:
        return {}
    return {"equal_rewards": statistics.fmean(map(rewards_are_equal, rewards.values()))}
