"""The dotted keys that a configuration has, and the nearest ones to a key that it has not."""

import difflib
from collections.abc import Iterable
from typing import get_args

from pydantic.fields import FieldInfo

from stillhouse.config.errors import ConfigError
from stillhouse.config.section import Section

CLOSE_ENOUGH = 0.6


def section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section, optional or not; None for a plain value."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def value_fields(model: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key that takes a value, by its full dotted path, in the order of the classes."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            fields[prefix + name] = field
        else:
            fields |= value_fields(section, f"{prefix}{name}.")
    return fields


def unknown_key(key: str, model: type[Section]) -> ConfigError:
    """The error for `key`: with the nearest right ones or, where nothing is near, with what there is."""
    near = nearest(key, {**value_fields(model), **model.model_fields})
    if near:
        return ConfigError(key, f"unknown key; did you mean {' or '.join(near)}?")
    parent = key.rpartition(".")[0]
    siblings = [known.removeprefix(f"{parent}.") for known in value_fields(model) if known.startswith(f"{parent}.")]
    if siblings:
        return ConfigError(key, f"unknown key; {parent} has: {', '.join(siblings)}")
    return ConfigError(key, f"unknown key; there are: {', '.join(model.model_fields)}")


def nearest(key: str, known: Iterable[str]) -> list[str]:
    """The known keys most like `key`: the right name in the wrong section, or a misspelling. At most three."""
    likeness = {candidate: _likeness(key, candidate) for candidate in known}
    best = max(likeness.values())
    return (
        [candidate for candidate, score in likeness.items() if score == best][:3] if best[0] >= CLOSE_ENOUGH else []
    )


def _likeness(key: str, candidate: str) -> tuple[float, float]:
    """How like the last names are, then how like the whole paths; a key without a section may be a joined path."""

    def ratio(a: str, b: str) -> float:
        return difflib.SequenceMatcher(None, a, b).ratio()

    section, _, name = key.rpartition(".")
    whole, last = ratio(key, candidate), ratio(name, candidate.rpartition(".")[2])
    return (last, whole) if section else (max(last, whole), 0.0)
