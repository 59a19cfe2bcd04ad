"""The value that is meant by one that a key does not accept: other tools' names, misspellings, missing brackets."""

import difflib
from collections.abc import Sequence
from typing import Any

from stillhouse.config.peers import peer_value
from stillhouse.config.words import Schema


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
        near = peer_value(key, value) or _nearest(value, choices)
        return near or ("" if items is None else _in_brackets(value, items, default))
    if isinstance(value, list) and items is not None and "enum" in items:
        unknown = [name for name in value if isinstance(name, str) and name not in items["enum"]]
        return next(filter(None, (_nearest(name, items["enum"]) for name in unknown)), "")
    return ""


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
