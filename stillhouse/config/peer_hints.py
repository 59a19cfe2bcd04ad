"""What a key of another tool is called here, in words: for the errors about unknown keys and options."""

from stillhouse.config.peer_key import PEERS
from stillhouse.config.peer_names import TABLE

#: in a hint about a name for which there is nothing to write instead
NO_KEY = "has no key here"


def peer_hint(key: str, *, whole: bool = False) -> str | None:
    """What a key that another tool has is called here, in words; None for a name that no tool of the table has.

    key: as it was written, in a section or not, with underscores or dashes. whole: it has a section, and the other
    tool's name is the same with its section.
    """
    wanted = key.lower().replace("-", "_")
    matches = [
        (len(name), row, name)
        for row in TABLE
        for name, _ in row.names()
        if (wanted == name.lower() and "." in name if whole else _same(wanted, name.lower()))
    ]
    if not matches:
        return None
    _, row, name = max(matches, key=lambda each: each[0])
    peers = sorted({peer for each, peer in row.names() if peer and each == name}, key=list(PEERS.values()).index)
    subject = f"{name} of {_listed(peers, 'and')}" if peers else name
    if not row.keys:
        return f"{subject} {NO_KEY}: {row.note}"
    note = f" ({row.note})" if row.note else ""
    keys = [key if "." in key else f"the key {key}" for key in _fitting(row.keys, wanted)]
    return f"{subject} is {_listed(keys, 'or')} here{note}"


def _same(wanted: str, name: str) -> bool:
    """Whether one of two dotted names ends with the other; the shorter one of a dotted name needs two parts."""
    if wanted == name or wanted.endswith(f".{name}"):
        return True
    return "." in wanted and name.endswith(f".{wanted}")


def _fitting(keys: tuple[str, ...], wanted: str) -> list[str]:
    """Of keys in several sections, those of the section that the written name speaks of."""
    of_section = [key for key in keys if wanted.startswith(key.partition(".")[0])]
    return of_section or list(keys)


def _listed(names: list[str], word: str) -> str:
    return f" {word} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
