"""Other tools' names for Stillhouse's keys and values, for hints in errors.

The names are in `other_tools.yaml`; it is read when the first hint is needed.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from stillhouse.config.section import Section
from stillhouse.config.yaml_text import read_yaml
from stillhouse.display import enumerated

FILE = Path(__file__).with_name("other_tools.yaml")
PEERS = {"trl": "TRL", "verl": "verl", "automodel": "Automodel", "swift": "ms-swift", "axolotl": "axolotl"}
#: part of a hint about a name without a counterpart here
NO_KEY = "has no key here"

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
        """Pairs of a tool and a name; the tool is "" for the names in `also`."""
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
    return PeerTable.model_validate(read_yaml(FILE.read_text(encoding="utf-8"), FILE.name))


def peer_entries() -> list[PeerKey]:
    """The entries in the order of docs/coming_from.md."""
    return [*peer_table().keys, *peer_table().without_key]


def peer_value(key: str, value: str) -> str:
    """Stillhouse's value for a value of another tool; "" if the table does not contain the value."""
    values = peer_table().values.get(key, {})
    return next((ours for ours, theirs in values.items() if value.lower() in theirs), "")


def loss_hint(problem: str) -> str:
    """What to write for another tool's loss or argument that an error about `objective.loss` names; "" if the table
    does not contain it.
    """
    match = re.search(r"(unknown name|unexpected keyword argument|cannot read) '(\w+)'", problem)
    if match is None:
        return ""
    kind, name = match.groups()
    notes = [loss.note for loss in peer_table().losses if name.lower() in loss.also]
    hint = notes[0] if notes else peer_hint(name) if kind == "unexpected keyword argument" else None
    return f"; {name}: {hint}" if notes else f"; {hint}" if hint else ""


def peer_hint(key: str, *, with_section: bool = False) -> str | None:
    """A hint with Stillhouse's key for another tool's name; None if the table does not contain the name.

    key: the name as the user wrote it, with or without a section, with underscores or dashes.
    with_section: whether the section must match, too.
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
