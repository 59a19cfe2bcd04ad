"""The value that is meant by one that a key does not accept: other tools' names, misspellings, missing brackets."""

import difflib
from collections.abc import Sequence
from typing import Any

from stillhouse.config.words import Schema

#: by key: our value, and what other tools call it
OF_PEERS = {
    "train.optimizer": {
        "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_anyprecision adamw_fused fused_adam"
        " paged_adamw paged_adamw_32bit torch.optim.adamw",
        "adamw_8bit": "adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit adam_8bit adam8bit adamw8bit",
        "muon": "torch.optim.muon",
    },
    "device": {"cuda": "gpu nvidia", "cuda:0": "gpu:0", "cuda:1": "gpu:1"},
}


def value_hint(key: str, value: Any, schema: Schema, default: Any) -> str:
    """The value that is probably meant, for the end of an error; "" if none is near. schema, default: of the key."""
    near = _near(key, value, schema, default)
    return f"; did you mean {near}?" if near else ""


def _near(key: str, value: Any, schema: Schema, default: Any) -> str:
    parts = schema.get("anyOf", [schema])
    lists = [part.get("items", {}) for part in parts]
    items = next((item for item in lists if item.get("type") == "string"), None)
    choices = [choice for part in parts for choice in [*part.get("enum", []), *filter(None, [part.get("const")])]]
    if isinstance(value, str):
        near = _of_peer(key, value) or _nearest(value, choices)
        return near or ("" if items is None else _in_brackets(value, items, default))
    if isinstance(value, list) and items is not None and "enum" in items:
        unknown = [name for name in value if isinstance(name, str) and name not in items["enum"]]
        return next(filter(None, (_nearest(name, items["enum"]) for name in unknown)), "")
    return ""


def _of_peer(key: str, value: str) -> str:
    ours = OF_PEERS.get(key, {})
    return next((name for name, theirs in ours.items() if value.lower() in theirs.split()), "")


def _in_brackets(value: str, items: Schema, default: Any) -> str:
    """The list that is meant by a text, such as [tensorboard, wandb] by tensorboard,wandb, and [] by none."""
    if default == [] and value.lower() in ("none", "null", ""):
        return "[]"
    names = [name.strip() for name in value.split(",")]
    if "enum" in items:
        names = [_nearest(name, items["enum"]) for name in names]
    return f"[{', '.join(names)}]" if all(names) else ""


def _nearest(value: str, choices: Sequence[Any]) -> str:
    near = difflib.get_close_matches(value.lower(), [choice for choice in choices if isinstance(choice, str)], n=1)
    return near[0] if near else ""
