"""Converts each error of pydantic to one line: the key, the value, the expected values, and a suggestion.

`other_tools.yaml` has other tools' names for Stillhouse's keys and values. It is read at the first suggestion.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationError
from pydantic_core import ErrorDetails

from stillhouse.config.errors import ConfigError, MissingKeyError, listed
from stillhouse.config.schema import (
    ANY_NAME,
    Schema,
    accepted_values,
    inner_section,
    item_section,
    named_sections,
    section_at,
    section_of,
    value_fields,
    yaml_value,
)
from stillhouse.config.section import Section
from stillhouse.config.yaml_text import read_yaml
from stillhouse.display import enumerated, name_list

PEERS = {"trl": "TRL", "verl": "verl", "automodel": "Automodel", "swift": "ms-swift", "axolotl": "axolotl"}
#: these words are in the hint about another tool's name if no key of Stillhouse has the same meaning
NO_KEY = "has no key here"
#: the minimum similarity between a misspelled key and the right key
CLOSE_ENOUGH = 0.75
#: the maximum number of mistakes that are explained, because each search for the nearest key takes about 10 ms
MOST = 20


def explain(error: ValidationError, content: Mapping[str, Any], model: type[Section]) -> ConfigError:
    """Return one error with the mistakes that pydantic found, in the order of the keys.

    content: the nested mapping that pydantic has checked against the class `model`.
    """
    mistakes: dict[str | None, ConfigError] = {}
    for detail in error.errors()[:MOST]:
        for mistake in _mistakes(detail, content, model):
            mistakes.setdefault(mistake.key, mistake)
    # if a key accepts a list or a text, a mistake in the list has a second error: that the list is not a text
    in_items = {key.partition("[")[0] for key in mistakes if key is not None and "[" in key}
    kept = [mistake for key, mistake in mistakes.items() if key not in in_items]
    return listed(kept, more=max(0, error.error_count() - MOST))


def _mistakes(detail: ErrorDetails, content: Mapping[str, Any], model: type[Section]) -> Iterator[ConfigError]:
    error = detail.get("ctx", {}).get("error")
    if isinstance(error, ConfigError):  # raised by a section's validator, with the key relative to the section
        yield type(error)(".".join(map(str, [*detail["loc"], error.key])), error.problem)
    elif error is not None:
        yield ConfigError(_field(detail["loc"], model)[0], str(error))
    elif detail["type"] in ("extra_forbidden", "invalid_key"):
        unknown = _dotted(detail["loc"], content)
        keys = [inner for inner in _leaves(unknown, detail["input"]) if inner != unknown]
        peer_keys = [inner for inner in keys if peer_hint(inner)]
        yield from (unknown_key(inner, model) for inner in peer_keys or [unknown])
        # in a section of another tool, each known key has its own error; this error lists all other keys
        if peer_keys and (others := [key.removeprefix(f"{unknown}.") for key in keys if key not in peer_keys]):
            near = "".join(f"did you mean {section}? " for section in nearest(unknown, model.model_fields))
            yield ConfigError(unknown, f"unknown section; {near}There are no suggestions for its {name_list(others)}")
    else:
        key, owner, name = _field(detail["loc"], model)
        section = section_at(key.rpartition(".")[0], model)
        if detail["type"] == "missing" and name == detail["loc"][-1] and owner is section:
            yield from _missing(key, owner, name)
        else:
            yield _wrong_value(key, owner, name, content)


def _dotted(location: Sequence[int | str], content: Any) -> str:
    """Return the key of a pydantic location, such as data.train[1].weight, without the names of union members."""
    key = ""
    for part in location:
        if isinstance(content, list) and isinstance(part, int):
            key, content = f"{key}[{part}]", content[part]
        elif isinstance(content, Mapping):
            key, content = f"{key}.{part}", content.get(part)
    return key.removeprefix(".")


def _leaves(key: str, value: Any) -> list[str]:
    """The dotted keys of all values in a section; only `key` if the value is not a section."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _field(location: tuple[int | str, ...], model: type[Section]) -> tuple[str, type[Section], str]:
    """The dotted key of a pydantic location, the class of the key's section, and the key's name in this section.

    Parts of the location after the key are ignored: they are members of unions and items of lists.
    """
    name, rest = str(location[0]), location[1:]
    prefix, section = f"{name}.", inner_section(model, name)
    number = next((at for at, part in enumerate(rest) if isinstance(part, int)), None)
    if number is not None and name in model.model_fields and (item := item_section(model.model_fields[name])):
        prefix, section, rest = f"{name}[{rest[number]}].", item, rest[number + 1 :]
    elif section is not None and rest and rest[0] not in section.model_fields and named_sections(section) is None:
        rest = ()
    if section is None or not rest:
        return name, model, name
    key, owner, last = _field(rest, section)
    return f"{prefix}{key}", owner, last


def _missing(key: str, owner: type[Section], name: str) -> Iterator[MissingKeyError]:
    field = owner.model_fields[name]
    if (section := section_of(field)) is None:
        example = field.examples[0] if field.examples else "..."
        yield MissingKeyError(key, f"required, but not given; expected: {_expected(owner, name)}, such as {example}")
        return
    for inner, inner_field in section.model_fields.items():
        if inner_field.is_required():
            yield from _missing(f"{key}.{inner}", section, inner)


def _wrong_value(key: str, owner: type[Section], name: str, content: Mapping[str, Any]) -> ConfigError:
    value: Any = content
    for part in re.findall(r"[^.[\]]+", key):
        value = value[int(part) if isinstance(value, list) else part]
    expected, hint = _expected(owner, name), ""
    if name in owner.model_fields and inner_section(owner, name) is None:
        field = owner.model_fields[name]
        if expected == "text" and field.examples:
            expected = f"text, such as {' or '.join(map(str, field.examples))}"
        if near := _near_value(key, value, owner.model_json_schema()["properties"][name], field.default):
            hint = f"; did you mean {near}?"
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    shown = yaml_value(value) if value is None or isinstance(value, bool) else short.repr(value)
    return ConfigError(key, f"got {shown}{' (text)' if isinstance(value, str) else ''}; expected: {expected}{hint}")


def _expected(owner: type[Section], name: str) -> str:
    section = inner_section(owner, name)
    if section is not None:
        keys = f", or one of the keys {', '.join(owner.model_fields)}" if name not in owner.model_fields else ""
        return f"a section with the keys {', '.join(section.model_fields)}{keys}"
    schema = owner.model_json_schema()["properties"][name]
    if "anyOf" not in schema and (item := item_section(owner.model_fields[name])):
        return f"a list of sections with the keys {', '.join(item.model_fields)}"
    return accepted_values(schema)


# suggestions for values


def _near_value(key: str, value: Any, schema: Schema, default: Any) -> str:
    """Return a suggestion for another tool's name, a misspelling or a list without brackets; "" for other values."""
    parts = schema.get("anyOf", [schema])
    items = next((part["items"] for part in parts if part.get("items", {}).get("type") == "string"), None)
    choices = [choice for part in parts for choice in [*part.get("enum", []), *filter(None, [part.get("const")])]]
    if isinstance(value, str):
        peer_values = peer_table().values.get(key, {})
        peer_value = next((ours for ours, theirs in peer_values.items() if value.lower() in theirs), "")
        near = peer_value or _nearest_choice(value, choices)
        if near or items is None:
            return near
        if default == [] and value.lower() in ("none", "null", ""):
            return "[]"
        names = [name.strip() for name in value.split(",")]
        if "enum" in items:
            names = [_nearest_choice(name, items["enum"]) for name in names]
        return f"[{', '.join(names)}]" if all(names) else ""
    if isinstance(value, list) and items is not None and "enum" in items:
        unknown = [name for name in value if isinstance(name, str) and name not in items["enum"]]
        return next(filter(None, (_nearest_choice(name, items["enum"]) for name in unknown)), "")
    return ""


def _nearest_choice(value: str, choices: Sequence[Any]) -> str:
    near = difflib.get_close_matches(value.lower(), [choice for choice in choices if isinstance(choice, str)], n=1)
    return near[0] if near else ""


# suggestions for keys


def unknown_key(key: str, model: type[Section]) -> ConfigError:
    """The error for an unknown key.

    It suggests keys with the same name in other sections, the key for another tool's name, similar keys, or all keys
    of the section.
    """
    values = value_fields(model)
    all_fields = {**values, **model.model_fields}
    parent, _, name = key.rpartition(".")
    section = section_at(parent, model)
    if section is not None and name in section.removed:
        return section.removed_key(key)
    is_elsewhere = any(other.rpartition(".")[2] == name for other in all_fields)
    # the user may have written another tool's name with a dot: eval.steps for eval_steps
    joined = key.replace(".", "_") if "." in key else ""
    siblings = [other.removeprefix(f"{parent}.") for other in values if other.startswith(f"{parent}.")]
    if section is not None and "[" in parent:
        near, keys = nearest(name, section.model_fields), ", ".join(section.model_fields)
        problem = f"did you mean {near[0]}?" if near else f"the keys of {parent} are: {keys}"
    elif hint := peer_hint(key, with_section=is_elsewhere) or peer_hint(joined):
        problem = hint
    elif similar := nearest(key, all_fields):
        problem = f"did you mean {' or '.join(similar)}?"
    else:
        problem = f"the keys{f' of {parent}' if siblings else ''} are: {', '.join(siblings or model.model_fields)}"
    return ConfigError(key, f"unknown key; {problem}")


def override_hint(option: str, model: type[Section]) -> str:
    """Return a hint with the override to use instead of an option such as --learning-rate; "" if there is none."""
    name = option.lstrip("-").replace("-", "_")
    fields = [key for key in value_fields(model) if ANY_NAME not in key]
    same_name = sorted((key for key in fields if key.rpartition(".")[2] == name), key=_rarity)[:3]
    if keys := [name] if name in fields else same_name:
        return f"; an override has no dashes: {'=... or '.join(keys)}=..."
    if hint := peer_hint(name):
        return f"; {hint}" if NO_KEY in hint else f"; {hint}; write key=value, without dashes"
    keys = nearest(name, fields)
    return f"; did you mean the override {'=... or '.join(keys)}=...?" if keys else ""


def nearest(key: str, candidates: Iterable[str]) -> list[str]:
    """Return at most three candidates with the greatest similarity to `key`; [] if it is below `CLOSE_ENOUGH`."""
    section, _, name = key.rpartition(".")
    if name.startswith("_"):  # such as Hydra's _target_: no key of Stillhouse begins with _
        return []
    similarity: dict[str, tuple[float, float]] = {}
    for candidate in candidates:
        full_ratio = _ratio(key, candidate)
        name_ratio = _ratio(name, candidate.rpartition(".")[2])
        # if `key` has no section, the user may have omitted the section, or only the dot after it
        similarity[candidate] = (name_ratio, full_ratio) if section else (max(name_ratio, full_ratio), 0.0)
    best = max(similarity.values())
    if best[0] < CLOSE_ENOUGH:
        return []
    return sorted((name for name, score in similarity.items() if score == best), key=_rarity)[:3]


def _rarity(key: str) -> tuple[bool, int, bool]:
    """Sorts keys: first those of train, then those of other sections, and last those of sections within sections."""
    return ANY_NAME in key, key.count("."), not key.startswith("train.")


def _ratio(key: str, candidate: str) -> float:
    if len(key) >= 3 and candidate.startswith(key):  # an abbreviation
        return 1.0
    return difflib.SequenceMatcher(None, key, candidate).ratio()


# names of other tools
#: names that are separated by spaces
Names = Annotated[tuple[str, ...], BeforeValidator(lambda text: tuple(text.split()))]


class PeerKey(Section, validate_default=False):
    """One entry of `other_tools.yaml`; that file explains the fields."""

    ours: Names = ()
    trl: Names = ()
    verl: Names = ()
    automodel: Names = ()
    swift: Names = ()
    axolotl: Names = ()
    also: Names = ()
    note: str = ""

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of a name and its tool; the tool is "" for the names in `also`."""
        for field in (*PEERS, "also"):
            for name in getattr(self, field):
                yield name, PEERS.get(field, "")


class PeerTable(Section):
    """The content of `other_tools.yaml`."""

    keys: list[PeerKey]
    without_key: list[PeerKey]
    losses: list[PeerKey]
    values: dict[str, dict[str, Names]]


@cache
def peer_table() -> PeerTable:
    """The names of other tools. Raises pydantic's ValidationError if an entry is malformed."""
    file = Path(__file__).with_name("other_tools.yaml")
    return PeerTable.model_validate(read_yaml(file.read_text(encoding="utf-8"), file.name))


def peer_entries() -> list[PeerKey]:
    """The entries in the order of docs/coming_from.md."""
    return [*peer_table().keys, *peer_table().without_key]


def loss_hint(problem: str) -> str:
    """Return a hint about another tool's name of a loss or argument in the message `problem`; "" if it has none."""
    match = re.search(r"(unknown name|unexpected keyword argument|cannot read) '(\w+)'", problem)
    if match is None:
        return ""
    kind, name = match.groups()
    notes = [loss.note for loss in peer_table().losses if name.lower() in loss.also]
    hint = notes[0] if notes else peer_hint(name) if kind == "unexpected keyword argument" else None
    return f"; {name}: {hint}" if notes else f"; {hint}" if hint else ""


def peer_hint(key: str, *, with_section: bool = False) -> str | None:
    """Return a hint with Stillhouse's key for another tool's name; None if the table does not contain the name.

    key: the name as the user wrote it, with or without a section, with underscores or dashes.
    with_section: whether the section must also match.
    """
    spelling = key.lower().replace("-", "_")

    def matches(name: str) -> bool:
        if with_section:
            return spelling == name and "." in name
        is_end = "." in spelling and name.endswith(f".{spelling}")
        return spelling == name or spelling.endswith(f".{name}") or is_end

    matching = [(entry, name) for entry in peer_entries() for name, _ in entry.names() if matches(name.lower())]
    if not matching:
        return None
    entry, name = max(matching, key=lambda match: len(match[1]))
    peers = [peer for other, peer in entry.names() if peer and other == name]
    subject = f"{name} of {enumerated(peers, 'and')}" if peers else name
    if not entry.ours:
        return f"{subject} {NO_KEY}: {entry.note}"
    note = f" ({entry.note})" if entry.note else ""
    fitting = [ours for ours in entry.ours if spelling.startswith(ours.partition(".")[0])]
    keys = [ours if "." in ours else f"the key {ours}" for ours in fitting or entry.ours]
    return f"{subject} is {enumerated(keys, 'or')} here{note}"
