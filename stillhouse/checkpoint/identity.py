"""Two configurations are of the same run if all values that change the weights, except by rounding, are equal."""

import hashlib
import json
from typing import Any

from stillhouse.config import RunConfig
from stillhouse.config.read_config import dotted_values

#: sections and keys that may change when a run is resumed
_FREE = {
    "out",
    "eval",
    "checkpoint",
    "track",
    "data.cache",
    "device",
    "parallel",
    "teacher.parallel",
    "teacher.offload",
    "teacher.url",
    "teacher.api",
    "teacher.timeout",
    "teacher.prove",
    "teacher.prove_every",
    "teacher.accept",
    "rollout.url",
    "rollout.weights",
    "rollout.timeout",
    "objective.chunk_tokens",
    "train.micro_batch_tokens",
    "train.timeout",
    "train.activation_checkpointing",
}

#: keys that versions before them lacked, with the values that mean what those versions did
_ADDED: dict[str, Any] = {
    "data.chat_template": None,
    "train.optimizer": "adamw",
    "train.momentum": 0.95,
    "student.init": None,
    "student.mtp": None,
    "teacher.quantize": None,
    "objective.hidden": [],
    "rollout.deviation": "population",
}


def decisive_values(config: RunConfig) -> dict[str, Any]:
    """The values that must not change when a run is resumed, by their dotted keys."""
    free = tuple(f"{key}." for key in _FREE)
    values = dotted_values(config)
    if config.rollout is None:
        del values["rollout"]  # so that runs of versions without this section go on
    for name in config.several:
        values |= {f"teachers.{name}.{key}": value for key, value in values.pop(f"teachers.{name}").items()}
    return {
        key: value
        for key, value in values.items()
        if not _like_teacher(key).startswith(free)
        and not _is_as_before(_like_teacher(key).removesuffix("."), value)  # so that runs of those versions go on
    }


def _is_as_before(key: str, value: Any) -> bool:
    return key in _ADDED and _ADDED[key] == value


def _like_teacher(key: str) -> str:
    """The key with a dot at its end; a key of one of several teachers as that of the section teacher."""
    section, _, rest = key.partition(".")
    return f"teacher.{rest.partition('.')[2]}." if section == "teachers" and "." in rest else f"{key}."


def configuration_hash(config: RunConfig) -> str:
    """A sha256 over `decisive_values`."""
    return hashlib.sha256(json.dumps(decisive_values(config), sort_keys=True).encode()).hexdigest()
