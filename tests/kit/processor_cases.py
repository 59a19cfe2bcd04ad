"""Rows of two documents each, for the tests of output processors and of their contexts; teachers' heads.

B rows, S tokens per row, T = B·S, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from kit.objective_cases import generator

from stillhouse.models import OutputProcessor
from stillhouse.objective import FullVocab, OutputHead
from stillhouse.parallel import TeacherHidden

B, S, V = 2, 17, 251
T = B * S
DOCUMENTS = ((9, 8), (5, 12))  # of each row

IDS_BS = torch.randint(3, V, (B, S), generator=generator(0))
POSITIONS_BS = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in DOCUMENTS])


# a document's last token and its prompt of three tokens have no label
LABELS_BS = IDS_BS.roll(-1, 1).masked_fill((POSITIONS_BS.roll(-1, 1) == 0) | (POSITIONS_BS < 2), -100)
LABELS_T = LABELS_BS.flatten()
KNOWN_T = LABELS_T >= 0
LABELLED = int(KNOWN_T.sum())
SOME_T = torch.zeros(T)


def at_depth(processor: OutputProcessor, context: Any, depth: int = 1) -> Any:
    hidden_BSD, head = torch.zeros(B, S, 8), OutputHead(torch.zeros(V, 8))
    return processor(hidden_states=hidden_BSD, head=head, context=context, depth=depth)


@dataclass
class OpenHeads:
    """The teachers whose heads are open. most: the largest number of heads that were open at the same time."""

    names: list[str] = field(default_factory=list)
    most: int = 0

    def signal(self, name: str, full: FullVocab) -> TeacherHidden:
        """Return an exact signal whose head is not in it, and which is recorded here while it is open."""
        return TeacherHidden(full.hidden_TE, RecordedHead(name, full.head, self))


@dataclass(frozen=True)
class RecordedHead:
    name: str
    head: OutputHead
    heads: OpenHeads

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        self.heads.names.append(self.name)
        self.heads.most = max(self.heads.most, len(self.heads.names))
        yield self.head
        self.heads.names.remove(self.name)
