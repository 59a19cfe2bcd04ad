"""Rollouts: completions that a model generates, from an engine in this process or from servers, and their rewards."""

from stillhouse.generation.queue import RolloutQueue, require_versions, staleness
from stillhouse.generation.queue_state import QueueState
from stillhouse.generation.rollout_engines import RolloutEngine
from stillhouse.generation.rollout_plan import RolloutPlan
from stillhouse.generation.sample import (
    Completion,
    GenerationRequest,
    Sample,
    Sampling,
)
from stillhouse.generation.sample_writer import SampleWriter
from stillhouse.generation.step_documents import POLICY_VERSION, TargetRules, step_documents

__all__ = [
    "POLICY_VERSION",
    "Completion",
    "GenerationRequest",
    "QueueState",
    "RolloutEngine",
    "RolloutPlan",
    "RolloutQueue",
    "Sample",
    "SampleWriter",
    "Sampling",
    "TargetRules",
    "require_versions",
    "staleness",
    "step_documents",
]
