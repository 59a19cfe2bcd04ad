"""Tasks with answers that can be verified, under the names that configurations and scripts use.

For example `rollout.reward: stillhouse.tasks:exact_match`.
"""

from stillhouse.config.task_spec import TaskSpec
from stillhouse.data.task_problems import Problem, exact_match, is_held_out, problem

__all__ = ["Problem", "TaskSpec", "exact_match", "is_held_out", "problem"]
