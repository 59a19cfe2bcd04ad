"""The dotted keys of a configuration, and the keys that are most similar to an unknown key."""

import difflib
import re
from collections.abc import Iterable
from typing import get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from stillhouse.config.errors import ConfigError
from stillhouse.config.peers import NO_KEY, peer_hint
from stillhouse.config.section import Section

#: the least similarity of a misspelled key and the right one
CLOSE_ENOUGH = 0.75
#: stands for a name of the user's choice in a dotted key
ANY_NAME = "<name>"


def section_of(field: FieldInfo) -> type[Section] | None:
    """The class of a field that is a section, optional or not; None for a plain value, and for a list of sections."""
    if get_origin(field.annotation) is list:
        return None
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def item_section(field: FieldInfo) -> type[Section] | None:
    """The class of the sections of which a field is a list; None for any other field."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is list else ()
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, Section)), None)


def named_sections(model: type[Section]) -> type[Section] | None:
    """The class of the sections that a section has under names of the user's choice; None if it has none."""
    if model.model_config.get("extra") != "allow":
        return None
    return get_args(get_type_hints(model)["__pydantic_extra__"])[1]


def inner_section(model: type[Section], name: str) -> type[Section] | None:
    """The class of the section with this name in a section; None for a plain value and for an unknown name."""
    if name in model.model_fields:
        return section_of(model.model_fields[name])
    return named_sections(model)


def value_fields(model: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key that takes a value, by its full dotted path, in the order of the classes."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is None:
            fields[prefix + name] = field
        else:
            fields |= value_fields(section, f"{prefix}{name}.")
    if named := named_sections(model):
        fields |= value_fields(named, f"{prefix}{ANY_NAME}.")
    return fields


def unknown_key(key: str, model: type[Section]) -> ConfigError:
    """The error for an unknown key.

    It names the keys of this name in other sections, the key of what another tool calls so, the most similar keys, or
    all keys of the section.
    """
    known = {**value_fields(model), **model.model_fields}
    parent, _, name = key.rpartition(".")
    of_list = known.get(re.sub(r"\.\d+$", "", parent))
    if of_list is not None and (item := item_section(of_list)):
        return ConfigError(key, f"unknown key; the keys of {parent} are: {', '.join(item.model_fields)}")
    is_elsewhere = any(each.rpartition(".")[2] == name for each in known)
    # the section may be a part of the other tool's name: eval.steps for eval_steps
    joined = key.replace(".", "_") if "." in key else ""
    if hint := peer_hint(key, with_section=is_elsewhere) or peer_hint(joined):
        return ConfigError(key, f"unknown key; {hint}")
    if similar := nearest(key, known):
        return ConfigError(key, f"unknown key; did you mean {' or '.join(similar)}?")
    siblings = [known.removeprefix(f"{parent}.") for known in value_fields(model) if known.startswith(f"{parent}.")]
    if siblings:
        return ConfigError(key, f"unknown key; the keys of {parent} are: {', '.join(siblings)}")
    return ConfigError(key, f"unknown key; the keys are: {', '.join(model.model_fields)}")


def override_hint(option: str, model: type[Section]) -> str:
    """How a key is written that was given as an option, such as --learning-rate; "" for a name that is not known."""
    name = option.lstrip("-").replace("-", "_")
    known = value_fields(model)
    if found := [name] if name in known else [each for each in known if each.rpartition(".")[2] == name]:
        return f"; an override has no dashes: {_overrides(found)}"
    if hint := peer_hint(name):
        return f"; {hint}" if NO_KEY in hint else f"; {hint}; write key=value, without dashes"
    if found := nearest(name, known):
        return f"; did you mean the override {_overrides(found)}?"
    return ""


def _overrides(keys: Iterable[str]) -> str:
    return " or ".join(f"{key}=..." for key in keys if ANY_NAME not in key)


def nearest(key: str, known: Iterable[str]) -> list[str]:
    """At most three known keys that are most similar to `key`: the same name in another section, or a misspelling."""
    if key.rpartition(".")[2].startswith("_"):  # no key begins so: Hydra's _target_ is not a misspelling
        return []
    similarity = {candidate: _similarity(key, candidate) for candidate in known}
    best = max(similarity.values())
    return (
        [candidate for candidate, score in similarity.items() if score == best][:3] if best[0] >= CLOSE_ENOUGH else []
    )


def _similarity(key: str, candidate: str) -> tuple[float, float]:
    """The similarity of the last names, then that of the whole paths.

    For a key without a section, the larger of the two: the section may be joined to the name without a dot.
    """

    def ratio(a: str, b: str) -> float:
        if len(a) >= 3 and b.startswith(a):  # an abbreviation
            return 1.0
        return difflib.SequenceMatcher(None, a, b).ratio()

    section, _, name = key.rpartition(".")
    whole, last = ratio(key, candidate), ratio(name, candidate.rpartition(".")[2])
    return (last, whole) if section else (max(last, whole), 0.0)
