"""The name of a task and the range of its difficulty, as text: `sums`, `sums(2:4)`."""

import re
from dataclasses import dataclass

#: the range of lengths of each task, if none is given
LENGTHS = {"sums": (2, 6), "reversal": (2, 12), "brackets": (2, 12)}
#: shorter problems are too few to hold some of them out; longer ones exceed the context of small models
SHORTEST, LONGEST = 2, 256


@dataclass(frozen=True)
class TaskSpec:
    """A task and the lengths of its problems, both ends included.

    Raises ValueError for an unknown name and for lengths that are not in order or out of range.
    """

    name: str
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if self.name not in LENGTHS:
            raise ValueError(f"got task {self.name!r}, expected one of {', '.join(LENGTHS)}")
        if not SHORTEST <= self.shortest <= self.longest <= LONGEST:
            raise ValueError(
                f"got lengths {self.shortest}:{self.longest} for task {self.name}, expected a range from {SHORTEST} "
                f"to {LONGEST}, the smaller number first, such as 2:6"
            )

    @classmethod
    def parse(cls, text: str) -> "TaskSpec":
        """A task from `name` or `name(shortest:longest)`."""
        name, brace, rest = text.partition("(")
        if not brace:
            return cls.of(name)
        if not rest.endswith(")"):
            raise ValueError(f"got task {text!r}, expected a name, or a name with lengths such as sums(2:4)")
        return cls.of(name, rest[:-1])

    @classmethod
    def of(cls, name: str, lengths: str | None = None) -> "TaskSpec":
        """A task from its name and `shortest:longest`. None: the task's usual range."""
        if lengths is None:
            return cls(name, *LENGTHS.get(name, (SHORTEST, LONGEST)))
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", lengths)
        if match is None:
            raise ValueError(f"got lengths {lengths!r} for task {name}, expected shortest:longest, such as 2:6")
        return cls(name, int(match[1]), int(match[2]))
