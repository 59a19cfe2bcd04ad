"""The output heads of teachers on the student's last stage, which are open while the student's loss is computed.

T tokens, V rows of the vocabulary on this process, E a teacher's width.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stillhouse.models import Decoder
from stillhouse.objective import FullVocab, OutputHead, Signal, detached
from stillhouse.objective.signals import RowIndex


class TeacherHead(Protocol):
    """A teacher's output head on this process: all of it, or this process's rows of the vocabulary."""

    def opened(self) -> AbstractContextManager[OutputHead]:
        """Give the head until the context ends."""
        ...


@dataclass(frozen=True)
class DecoderHead:
    """The head of a decoder on this process, gathered while it is open if FSDP has sharded it.

    Opening a sharded head is a collective of its processes. keep_gathered: it stays gathered after that.
    """

    decoder: Decoder
    keep_gathered: bool = False

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        # the head's own group gathers its weight; the root's group does so if the head is tied to the embedding
        modules = (self.decoder.head, self.decoder)
        group = next((module for module in modules if isinstance(module, FSDPModule)), None)
        if group is not None:
            group.unshard()
        try:
            yield self.decoder.output_head()
        finally:
            if group is not None and not self.keep_gathered:
                group.reshard()


@dataclass(frozen=True)
class BufferedHead:
    """The head of a decoder in host memory, which is copied to the device while it is open.

    name: the teacher's, the same for the same weight.
    """

    name: str
    decoder: Decoder
    buffers: "HeadBuffers"

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        head = self.decoder.output_head()
        with self.buffers.holding(self.name, head.weight_VD) as weight_VD:
            bias = None if head.bias is None else head.bias.to(weight_VD.device)
            yield replace(head, weight_VD=weight_VD, bias=bias)


@dataclass(frozen=True, eq=False)
class TeacherHidden(Signal):
    """A teacher's hidden states [T, E] after its last norm, and its head on the student's last stage."""

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


class HeadBuffers:
    """Buffers on a device for weights [V, E] that are in host memory. Weights of one shape and dtype share a buffer,
    unless they are used at the same time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[Tensor] = []
        self._names: list[str | None] = []
        self._used: set[int] = set()

    @contextmanager
    def holding(self, name: str, weight_VE: Tensor) -> Iterator[Tensor]:
        """Yield a buffer with this weight. name: the same for the same weight, which is then not copied again."""
        at = self._place(name, weight_VE)
        self._used.add(at)
        try:
            if self._names[at] != name:
                self._names[at] = None
                self._buffers[at].copy_(weight_VE.detach(), non_blocking=True)
                self._names[at] = name
            yield self._buffers[at]
        finally:
            self._used.remove(at)

    def _place(self, name: str, weight_VE: Tensor) -> int:
        """The buffer that has this weight already, or a free one of its shape, or a new one."""
        fits = [
            at
            for at, buffer in enumerate(self._buffers)
            if at not in self._used and buffer.shape == weight_VE.shape and buffer.dtype == weight_VE.dtype
        ]
        for at in fits:
            if self._names[at] == name:
                return at
        if fits:
            return fits[0]
        self._buffers.append(torch.empty_like(weight_VE, device=self._device, requires_grad=False))
        self._names.append(None)
        return len(self._buffers) - 1
