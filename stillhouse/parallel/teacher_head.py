"""Output heads of teachers on the student's last stage. A head is open only while the student's loss is computed.

T tokens, E a teacher's width.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stillhouse.models import Decoder
from stillhouse.objective import FullVocab, OutputHead, Signal, detached
from stillhouse.objective.signals import RowIndex


class TeacherHead(Protocol):
    """A teacher's output head on this process, with all vocabulary rows or with this process's shard of them."""

    def opened(self) -> AbstractContextManager[OutputHead]:
        """Return a context that yields the head."""
        ...


@dataclass(frozen=True)
class DecoderHead:
    """The head of a decoder on this process. `opened` gathers a head that FSDP has sharded, as a collective.

    keep_gathered: whether the head stays gathered after its use.
    """

    decoder: Decoder
    keep_gathered: bool = False

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        # an untied head has its own FSDP group; a tied head is in the root's group
        modules = (self.decoder.head, self.decoder)
        group = next((module for module in modules if isinstance(module, FSDPModule)), None)
        if group is not None:
            group.unshard()
        try:
            yield self.decoder.output_head()
        finally:
            if group is not None and not self.keep_gathered:
                group.reshard()


@dataclass(frozen=True, eq=False)
class TeacherHidden(Signal):
    """A teacher's hidden states after its final norm, and its head."""

    hidden_TE: Tensor
    head: TeacherHead

    @property
    def tokens(self) -> int:
        return len(self.hidden_TE)

    def rows(self, rows: RowIndex) -> "TeacherHidden":
        return replace(self, hidden_TE=self.hidden_TE[rows])

    @contextmanager
    def opened(self, student: OutputHead) -> Iterator[Signal]:
        with self.head.opened() as head:
            yield FullVocab(self.hidden_TE.detach(), detached(head))
