"""Rollouts: completions that a model writes, from an engine in this process or from servers, and their rewards."""

from stillhouse.rollouts.engine import RolloutEngine
from stillhouse.rollouts.sample import Completion, GenerationRequest, Sampling

__all__ = ["Completion", "GenerationRequest", "RolloutEngine", "Sampling"]
