"""Rollouts: completions that a model writes, from an engine in this process or from servers, and their rewards."""

from stillhouse.rollouts.engine import RolloutEngine
from stillhouse.rollouts.packing import POLICY_VERSION, TargetRules, step_documents
from stillhouse.rollouts.plan import RolloutPlan
from stillhouse.rollouts.queue import RolloutQueue, require_versions, staleness
from stillhouse.rollouts.queue_state import QueueState
from stillhouse.rollouts.sample import Completion, GenerationRequest, Sample, Sampling
from stillhouse.rollouts.turns import SampleWriter

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
