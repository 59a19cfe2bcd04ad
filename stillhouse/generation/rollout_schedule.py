"""When samples are generated, and which of them a step trains on. Every schedule asks for them by the same rule:

    at step s, with the weights of version s, all groups of the steps up to s + ahead have been asked for

`ahead` is 0 for sync, 1 and 2 for one_step_off and two_step_off. Such a step trains on its own groups.

With `in_order=False` (async), a step trains on as many groups, on those that are finished first. A group that others
overtake must still be trained at most `max_staleness` steps after it was asked for. So a step takes a group out of
turn only if the steps after it have room for all others before their time is up. Overtaking needs slack: a group may
be asked for half of `max_staleness` ahead, and wait for the other half.

No token is then older than `max_staleness` versions, every group is trained exactly once, and none is dropped.
"""

from dataclasses import dataclass
from typing import Self

from stillhouse.config import RolloutConfig

_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


@dataclass(frozen=True)
class RolloutSchedule:
    """ahead: how many steps ahead of its own a step's groups are asked for.
    in_order: whether a step trains on its own groups, and not on those that are finished first.
    max_staleness: steps after which a group that was asked for has to be trained, `ahead` or more.
    last_step: of the run.
    """

    ahead: int
    in_order: bool
    max_staleness: int
    last_step: int

    @classmethod
    def of(cls, rollout: RolloutConfig, steps: int) -> Self:
        """The schedule that the configuration names, for so many steps."""
        ahead = min(_AHEAD.get(rollout.schedule, (rollout.max_staleness + 1) // 2), rollout.max_staleness)
        return cls(ahead, rollout.schedule != "async", rollout.max_staleness, steps - 1)

    def last_requested(self, step: int) -> int:
        """The last step whose groups have been asked for at a step."""
        return min(step + self.ahead, self.last_step)
