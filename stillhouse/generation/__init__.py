"""Rollouts: completions that a model generates, from an engine in this process or from servers, and their rewards."""

from stillhouse.generation.prompt_plan import PromptPlan, PromptSource
from stillhouse.generation.rollout_engines import RolloutEngine
from stillhouse.generation.rollout_queue import RolloutQueue, require_versions, staleness
from stillhouse.generation.rollout_queue_state import QueueState
from stillhouse.generation.sample import (
    Completion,
    GenerationRequest,
    Sample,
    Sampling,
)
from stillhouse.generation.sample_generator import SampleGenerator
from stillhouse.generation.source_settings import SourceSettings
from stillhouse.generation.step_documents import POLICY_VERSION, TargetRules, step_documents

__all__ = [
    "POLICY_VERSION",
    "Completion",
    "GenerationRequest",
    "PromptPlan",
    "PromptSource",
    "QueueState",
    "RolloutEngine",
    "RolloutQueue",
    "Sample",
    "SampleGenerator",
    "Sampling",
    "SourceSettings",
    "TargetRules",
    "require_versions",
    "staleness",
    "step_documents",
]
