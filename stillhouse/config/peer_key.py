"""One row of the table of other tools' names."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

PEERS = {"trl": "TRL", "verl": "verl", "automodel": "Automodel", "swift": "ms-swift", "axolotl": "axolotl"}


@dataclass(frozen=True)
class PeerKey:
    """Keys of ours, and the names of the same in other tools, separated by spaces; "" if they have none.

    also: names that are written as often: abbreviations, and names of older versions. note: what differs in meaning,
    or what to write if no key of ours has a value of the same form.
    """

    keys: tuple[str, ...] = ()
    trl: str = ""
    verl: str = ""
    automodel: str = ""
    swift: str = ""
    axolotl: str = ""
    also: str = ""
    note: str = ""

    def names(self) -> Iterator[tuple[str, str]]:
        """Each name with the tool that has it; "" for the names in `also`."""
        for field in fields(self):
            if field.name in PEERS or field.name == "also":
                for name in getattr(self, field.name).split():
                    yield name, PEERS.get(field.name, "")
