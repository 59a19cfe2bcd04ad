"""The output heads of several teachers on the student's last stage, of which only those in use take device memory.

Under FSDP, a head is gathered when it is opened and freed when it is closed. Otherwise the heads are in host memory,
and heads of one shape share a buffer on the device. V rows of the vocabulary on this process, E a teacher's width.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from stillhouse.models import Decoder
from stillhouse.objective import OutputHead


class TeacherHeads:
    """decoders: by the teacher's name, a teacher of which only the head is left, distributed like the student's.

    device: the device on which the heads are used. is_sharded: whether FSDP has sharded them. Opening a head is then
    a collective of the processes that share it.
    """

    def __init__(self, decoders: Mapping[str, Decoder], device: torch.device, *, is_sharded: bool):
        self._decoders, self.is_sharded = decoders, is_sharded
        self._buffers = HeadBuffers(device)

    @contextmanager
    def opened(self, name: str) -> Iterator[OutputHead]:
        """Yield a teacher's head, whole or this process's rows of the vocabulary, until the context ends."""
        decoder = self._decoders[name]
        if not self.is_sharded:
            head = decoder.output_head()
            with self._buffers.holding(name, head.weight_VD) as weight_VD:
                bias = None if head.bias is None else head.bias.to(weight_VD.device)
                yield replace(head, weight_VD=weight_VD, bias=bias)
            return
        # a tied head is in the root's group
        group = decoder.head if isinstance(decoder.head, FSDPModule) else decoder
        assert isinstance(group, FSDPModule)
        group.unshard()
        try:
            yield decoder.output_head()
        finally:
            group.reshard()


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
