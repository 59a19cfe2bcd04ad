"""The reward of tasks, under the name that configurations use: `stillhouse.tasks:exact_match`."""

from stillhouse.data.problems import exact_match

__all__ = ["exact_match"]
