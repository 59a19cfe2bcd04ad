"""The reward of a completion, as text: a function, a server, the environment, or a weighted sum of them.

    0.5*mypkg.rewards:exact + 2*http://127.0.0.1:9000/reward + environment

A `+` between two parts needs spaces around it, because an address may contain a `+`.
"""

import re
from collections import Counter
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from stillhouse.config.section import Text, checked_address, checked_function
from stillhouse.config.servers import ServerKind, reward_kinds

_WEIGHT = re.compile(r"(?P<weight>[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?) ?\* ?(?P<rest>.*)", re.DOTALL)


#: the name of the part that is computed by the method reward() of a class in rollout.environment or rollout.tools
OBJECT_REWARD = "environment"


class RewardSummand(NamedTuple):
    """A part of a reward. name: a function (package.module:function), the address of a server, or `OBJECT_REWARD`."""

    weight: float
    name: str

    @property
    def is_server(self) -> bool:
        return "://" in self.name

    @property
    def server(self) -> str:
        """The address of a server without the path."""
        return "{0.scheme}://{0.netloc}".format(urlsplit(self.name))

    @property
    def server_kind(self) -> ServerKind:
        return reward_kinds()[urlsplit(self.name).scheme]

    @property
    def is_function(self) -> bool:
        return not self.is_server and self.name != OBJECT_REWARD


def reward_parts(reward: str | None) -> list[RewardSummand]:
    """The parts of a reward; empty if the reward is None. Raises ValueError for an invalid text."""
    return [] if reward is None else [_part(text.strip()) for text in reward.split(" + ")]


def has_part_of_object(reward: str | None) -> bool:
    """Whether the reward has the part `OBJECT_REWARD`. Raises ValueError for an invalid text."""
    return any(part.name == OBJECT_REWARD for part in reward_parts(reward))


def part_names(reward: str | None) -> list[str]:
    """Return short and different names for the parts of a sum: the function's name, or the server's host and path.

    The second part with the same name gets the number 2, and so on. The result is empty if the reward is not a sum.
    """
    parts, seen, names = reward_parts(reward), Counter[str](), []
    for part in parts if len(parts) > 1 else []:
        address = urlsplit(part.name)
        name = address.netloc + address.path.rstrip("/") if part.is_server else part.name.rpartition(":")[2]
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def _part(text: str) -> RewardSummand:
    match = _WEIGHT.fullmatch(text)
    part = RewardSummand(1.0, text) if match is None else RewardSummand(float(match["weight"]), match["rest"])
    if part.is_server:
        checked_address(part.name, "http://host:port/path", "reward_tokens", reward_kinds())
    elif part.is_function:
        first, minus, rest = text.partition(" - ")
        if minus:
            negative = f"-{rest}" if _WEIGHT.fullmatch(rest) else f"-1*{rest}"
            raise ValueError(f"got {text!r}, expected a sum, in which a weight may be negative: {first} + {negative}")
        checked_function(part.name, text)
    return part


def _checked_reward(reward: Any) -> Any:
    if isinstance(reward, list) and reward and all(isinstance(part, str) for part in reward):  # as in TRL
        raise ValueError(f"got {reward}, expected one text: the weighted sum of the rewards, {' + '.join(reward)!r}")
    if not (isinstance(reward, str) and reward):
        return reward  # `Text` refuses it
    parts = reward_parts(reward)
    if any(part.weight in (0, float("inf"), float("-inf")) for part in parts):
        raise ValueError(f"got {reward!r}, expected weights that are finite and not 0")
    if len({part.name for part in parts}) < len(parts):
        raise ValueError(f"got {reward!r}, expected each function and each server once")
    return reward


#: a function, a server, the environment or a weighted sum of them
RewardText = Annotated[Text, BeforeValidator(_checked_reward)]
