"""Turns pydantic's errors into one line each: the key, the given value, the expected values."""

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from stillhouse.config.errors import ConfigError, MissingKeyError, listed
from stillhouse.config.keys import inner_section, item_section, section_of, unknown_key
from stillhouse.config.near_values import value_hint
from stillhouse.config.peers import peer_hint
from stillhouse.config.section import Section
from stillhouse.config.words import describe
from stillhouse.display import name_list

#: at most this many mistakes are explained, because finding the nearest key takes a hundredth of a second
MOST = 20


def explain(error: ValidationError, given: Mapping[str, Any], model: type[Section]) -> ConfigError:
    """One error with all mistakes that pydantic found in `given`, in the order of the keys."""
    found: dict[str | None, ConfigError] = {}
    for detail in error.errors()[:MOST]:
        for problem in _problems(detail, given, model):
            found.setdefault(problem.key, problem)
    return listed(list(found.values()), more=max(0, error.error_count() - MOST))


def _problems(detail: ErrorDetails, given: Mapping[str, Any], model: type[Section]) -> Iterator[ConfigError]:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, ConfigError):  # of a section's validator, which knows the key in its section
        yield type(error)(".".join(map(str, [*detail["loc"], error.key])), error.problem)
    elif error is not None:
        yield ConfigError(_field(detail["loc"], model)[0], str(error))
    elif detail["type"] in ("extra_forbidden", "invalid_key"):
        key = ".".join(map(str, detail["loc"]))
        within = [each for each in _leaves(key, detail["input"]) if each != key]
        of_peers = [each for each in within if peer_hint(each)]
        yield from (unknown_key(each, model) for each in of_peers or [key])
        if of_peers and (others := [each.removeprefix(f"{key}.") for each in within if each not in of_peers]):
            yield ConfigError(key, f"unknown section; nothing is known here of its {name_list(others)}")
    else:
        key, owner, name = _field(detail["loc"], model)
        if detail["type"] == "missing" and len(detail["loc"]) == key.count(".") + 1:
            yield from _missing(key, owner, name)
        else:
            expected = _expected(owner, name)
            if expected == "text" and (examples := owner.model_fields[name].examples):
                expected = f"text, such as {' or '.join(map(str, examples))}"
            value = _value(given, key)
            near = ""
            if name in owner.model_fields and inner_section(owner, name) is None:
                schema = owner.model_json_schema()["properties"][name]
                near = value_hint(key, value, schema, owner.model_fields[name].default)
            yield ConfigError(key, f"got {_shown(value)}; expected: {expected}{near}")


def _leaves(key: str, value: Any) -> Iterator[str]:
    """The dotted keys within the value of a key; the key itself if it is no section."""
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, each in value.items():
        yield from _leaves(f"{key}.{name}", each)


def _field(location: tuple[int | str, ...], model: type[Section]) -> tuple[str, type[Section], str]:
    """The dotted key, the class of its section, and its name in that section.

    Parts of the location after the key are ignored: pydantic also names members of unions and items of lists.
    """
    name, *rest = map(str, location)
    section = inner_section(model, name)
    if (
        section is None
        or not rest
        or (rest[0] not in section.model_fields and inner_section(section, rest[0]) is None)
    ):
        return name, model, name
    key, owner, last = _field(tuple(rest), section)
    return f"{name}.{key}", owner, last


def _missing(key: str, owner: type[Section], name: str) -> Iterator[MissingKeyError]:
    field = owner.model_fields[name]
    section = section_of(field)
    if section is not None:
        for inner, inner_field in section.model_fields.items():
            if inner_field.is_required():
                yield from _missing(f"{key}.{inner}", section, inner)
    else:
        example = field.examples[0] if field.examples else "..."
        yield MissingKeyError(key, f"required, but not given; expected: {_expected(owner, name)}, such as {example}")


def _expected(owner: type[Section], name: str) -> str:
    section = inner_section(owner, name)
    if section is not None:
        own = f", or one of the keys {', '.join(owner.model_fields)}" if name not in owner.model_fields else ""
        return f"a section with the keys {', '.join(section.model_fields)}{own}"
    if name in owner.model_fields and (item := item_section(owner.model_fields[name])):
        return f"a list of sections with the keys {', '.join(item.model_fields)}"
    return describe(owner.model_json_schema()["properties"][name])


def _value(given: Mapping[str, Any], key: str) -> Any:
    value: Any = given
    for name in key.split("."):
        value = value[name]
    return value


def _shown(value: Any) -> str:
    """The value as it is written in YAML, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    return short.repr(value) + (" (text)" if isinstance(value, str) else "")
