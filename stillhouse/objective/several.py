"""The signals of several teachers for the same tokens.

    SeveralSignals   every teacher judges every token: one pass over the student's logits with a term for each teacher
    RoutedSignals    every token has one teacher: the rows of one teacher after the other, in one pass

T tokens.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from stillhouse.objective.signals import RowIndex, Signal


@dataclass(frozen=True, eq=False)
class SeveralSignals(Signal):
    """The signals of several teachers for the same T tokens, by the teachers' names.

    Raises ValueError without a signal, and for signals of different numbers of tokens.
    """

    named: Mapping[str, Signal]

    def __post_init__(self) -> None:
        counts = {name: each.tokens for name, each in self.named.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"signals of {counts} tokens: expected one or more teachers, all for the same tokens")

    @property
    def tokens(self) -> int:
        return next(iter(self.named.values())).tokens

    def rows(self, rows: RowIndex) -> "SeveralSignals":
        return SeveralSignals({name: each.rows(rows) for name, each in self.named.items()})


@dataclass(frozen=True, eq=False)
class RoutedSignals:
    """The signals of several teachers, each of which judges some of the T tokens.

    rows: by the teacher's name, the int64 index of its rows with a weight; no row is in two of them.
    opened: gives a teacher's signal for all T tokens while its context is open. So only one teacher's output head is
    needed at a time.
    """

    rows: Mapping[str, Tensor]
    opened: Callable[[str], AbstractContextManager[Signal]]
