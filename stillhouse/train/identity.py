"""Two configurations are of the same run if all values that change the weights, except by rounding, are equal."""

import hashlib
import json
from typing import Any

from stillhouse.config import RunConfig
from stillhouse.config.loading import dotted_values

#: sections and keys that may change when a run is resumed
_FREE = {
    "out",
    "eval",
    "checkpoint",
    "track",
    "device",
    "parallel",
    "teacher.parallel",
    "teacher.url",
    "teacher.api",
    "teacher.timeout",
    "teacher.prove",
    "teacher.prove_every",
    "teacher.accept",
    "objective.chunk_tokens",
    "train.micro_batch_tokens",
    "train.timeout",
    "train.activation_checkpointing",
}


def decisive_values(config: RunConfig) -> dict[str, Any]:
    """The values that must not change when a run is resumed, by their dotted keys."""
    free = tuple(f"{key}." for key in _FREE)
    return {key: value for key, value in dotted_values(config).items() if not f"{key}.".startswith(free)}


def configuration_hash(config: RunConfig) -> str:
    """A sha256 over `decisive_values`."""
    return hashlib.sha256(json.dumps(decisive_values(config), sort_keys=True).encode()).hexdigest()
