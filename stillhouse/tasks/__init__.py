"""Tasks with answers that can be verified: problems from a seed, a held-out split, the reward for an exact match."""

from stillhouse.config.task import TaskSpec
from stillhouse.tasks.problems import Problem, exact_match, is_held_out, problem

__all__ = ["Problem", "TaskSpec", "exact_match", "is_held_out", "problem"]
