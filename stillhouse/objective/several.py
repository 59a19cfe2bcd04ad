"""Signals of which a part comes from elsewhere: the student's own head, or the rows that a teacher scores.

T tokens, D width of the student.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from stillhouse.objective.head import OutputHead
from stillhouse.objective.signals import FullVocab, RowIndex, Signal


@dataclass(frozen=True, eq=False)
class StudentHidden(Signal):
    """The exact signal of a teacher that has the student's head: its hidden states [T, D] after the last norm."""

    hidden_TD: Tensor

    def opened(self, student: OutputHead) -> AbstractContextManager[Signal]:
        return nullcontext(FullVocab(self.hidden_TD.detach(), detached(student)))


@dataclass(frozen=True, eq=False)
class RoutedSignal(Signal):
    """The signal of one of several teachers, each of which scores some of the T tokens.

    signal: for all T tokens. index: the int64 numbers of its rows with a weight; no row is in those of two teachers.
    The signal is opened only while its own rows are computed, so that one teacher's head at a time is in memory.
    """

    signal: Signal
    index: Tensor

    def rows(self, rows: RowIndex) -> Self:
        raise ValueError("the rows of a routed signal cannot be cut: expected one teacher for all tokens")


def detached(head: OutputHead) -> OutputHead:
    """Return the head without gradients. A frozen weight stays the same tensor."""
    if not head.weight_VD.requires_grad:
        return head
    return replace(head, weight_VD=head.weight_VD.detach(), bias=None if head.bias is None else head.bias.detach())
