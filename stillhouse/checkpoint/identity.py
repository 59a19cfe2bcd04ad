"""The identity of a run: hashes of its data, its models, and the configuration values that determine the weights.

A value that changes the weights only by rounding errors, such as the layout, is not part of the identity.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stillhouse.config.source_kinds import source_kinds
from stillhouse.hashing import json_hash

#: sections and keys that may change when a run is resumed
_FREE = {
    *("out", "eval", "checkpoint", "track", "data.cache", "device", "deterministic", "parallel"),
    *("teacher.parallel", "teacher.offload", "teacher.api", "teacher.timeout", "teacher.token_variable"),
    *("teacher.prove", "teacher.prove_every", "teacher.accept"),
    *("rollout.url", "rollout.weights", "rollout.timeout", "rollout.token_variable", "rollout.reward_tokens"),
    *("rollout.workers", "rollout.worker_timeout", "rollout.worker_memory", "rollout.samples"),
    *("objective.chunk_tokens", "objective.kernels"),
    *("train.micro_batch_tokens", "train.timeout", "train.activation_checkpointing"),
    *(f"teacher.{key}" for key, kind in source_kinds().items() if kind.is_address),
}

#: keys that earlier versions did not have, with the values that give their behaviour: their runs can be resumed
_ADDED: dict[str, Any] = {
    "data.chat_template": None,
    "data.image_pixels": None,
    "data.packing": "auto",
    "train.optimizer": "adamw",
    "train.momentum": 0.95,
    "student.init": None,
    "student.mtp": None,
    "student.train": ["language"],
    "student.quantize": None,
    "teacher.quantize": None,
    "objective.hidden": [],
    "objective.by_origin": None,
    "rollout.deviation": "population",
    "rollout.tools": None,
    "rollout.tool_tokens": 256,
    "rollout.reply": "raw",
    **{f"teacher.{key}": None for key in {*source_kinds()} - {"model", "cache", "student", "cross_tokenizer"}},
}


#: the key in `RunIdentity.data` for the packing that determines the order of the documents: "rows", or absent
ORDER = "packing"
#: keys in `RunIdentity.models` of runs that generate completions, and what an error says of them: the
#: end-of-sequence ids in words, and `text_fingerprint`. Earlier versions did not write them
COMPLETION_KEYS = {
    "end_ids": "the ids that end a completion (eos_token_id in generation_config.json, or the tokenizer's eos_token)",
    "text": "the text of ids and conversations (the decoder, the added tokens or the chat template of the tokenizer)",
}
#: the beginning of a key in `RunIdentity.data` for a processor of media, before the key of its model's section. The
#: documents' hashes include it, so it only says what has changed
PROCESSOR = "processor/"
#: a key in `RunIdentity.data` with the names of the vectors of several dims that weight decay leaves out. Earlier
#: versions applied it to them
DECAY = "weight decay"


@dataclass(frozen=True)
class RunIdentity:
    """The hashes that must be the same when a run is resumed.

    data: a hash of the documents, by split; also `ORDER`, `PROCESSOR` and `DECAY`
    models: a hash of the tokenizer, and a hash of each model's files; also `COMPLETION_KEYS`
    """

    configuration: str
    data: dict[str, str]
    models: dict[str, str]


def decisive_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values that must not change when a run is resumed, from all values by dotted keys."""
    several = [key for key in sorted(values) if key.startswith("teachers.") and isinstance(values[key], Mapping)]
    flat = {key: value for key, value in values.items() if key not in several}
    flat |= {f"{key}.{name}": value for key in several for name, value in values[key].items()}
    if flat.get("rollout", ...) is None:
        del flat["rollout"]  # so that runs of versions without this section can be resumed
    free, decisive = tuple(f"{key}." for key in _FREE), dict[str, Any]()
    for key, value in flat.items():
        single = re.sub(r"^teachers\.[^.]*\.", "teacher.", key)  # the rules of one of several teachers are the same
        if not f"{single}.".startswith(free) and _ADDED.get(single, ...) != value:
            decisive[key] = value
    return decisive


def configuration_hash(values: Mapping[str, Any]) -> str:
    """A sha256 of `decisive_values`."""
    return json_hash(decisive_values(values))
