"""Rollouts: completions that a model generates, from an engine in this process or from servers, and their rewards."""

from stillhouse.rollout.documents import TargetRules, step_documents
from stillhouse.rollout.plan import PromptPlan, PromptSource
from stillhouse.rollout.queue import QueueState, RolloutQueue, staleness
from stillhouse.rollout.records import Completion, GenerationRequest, Sample, Sampling
from stillhouse.rollout.samples import Samples, SourceSettings

__all__ = [
    "Completion",
    "GenerationRequest",
    "PromptPlan",
    "PromptSource",
    "QueueState",
    "RolloutQueue",
    "Sample",
    "Samples",
    "Sampling",
    "SourceSettings",
    "TargetRules",
    "staleness",
    "step_documents",
]
