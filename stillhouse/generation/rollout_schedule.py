"""Decides when groups of samples are requested and which groups a step trains on. All schedules request by one rule:

    at step s, when the weights have version s, all groups of the steps up to s + ahead have been requested

`ahead` is 0 for sync, 1 for one_step_off and 2 for two_step_off. In these schedules, a step trains on its own groups.

In the async schedule (`in_order=False`), a step trains on the same number of groups, but on those that finish first.
Every group must be trained at most `max_staleness` steps after its request. A step takes a group that finished early
only if the later steps can still train on all other groups in time. `ahead` is only half of `max_staleness`, so that
a group may be delayed by the other half.

Under all schedules, no token is older than `max_staleness` versions, and every group is trained exactly once.
"""

from dataclasses import dataclass
from typing import Self

from stillhouse.config import RolloutConfig

_AHEAD = {"sync": 0, "one_step_off": 1, "two_step_off": 2}


@dataclass(frozen=True)
class RolloutSchedule:
    """ahead: how many steps a group is requested before the step to which the plan assigns it.
    in_order: whether a step trains on its own groups; if false, it trains on the groups that finish first.
    max_staleness: the maximum number of steps between the request of a group and its training; at least `ahead`.
    last_step: the number of the run's last step, from 0.
    """

    ahead: int
    in_order: bool
    max_staleness: int
    last_step: int

    @classmethod
    def of(cls, rollout: RolloutConfig, steps: int) -> Self:
        """The configured schedule for a run of `steps` steps."""
        ahead = min(_AHEAD.get(rollout.schedule, (rollout.max_staleness + 1) // 2), rollout.max_staleness)
        return cls(ahead, rollout.schedule != "async", rollout.max_staleness, steps - 1)

    def last_requested(self, step: int) -> int:
        """The last step whose groups have been requested once `step` begins."""
        return min(step + self.ahead, self.last_step)
