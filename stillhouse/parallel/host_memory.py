"""Weights of frozen teachers that are in host memory, except while they are used: of a whole model, or of a head.

V rows of the vocabulary on this process, E a teacher's width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stillhouse.models import Decoder
from stillhouse.objective import OutputHead


class WaitingWeights:
    """The parameters of a model of one process, all of which are in host memory. Its buffers are on the device.

    The host's copies stay where they are: leaving the device frees memory there and copies nothing back. For a GPU
    they are pinned, so that they are copied at the full speed of the bus.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._device = device
        self._parameters = list(model.parameters())  # a tied weight is listed once
        if device.type == "cuda":
            for parameter in self._parameters:
                parameter.data = parameter.data.pin_memory()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the weights to the device until the context ends."""
        in_host_memory = [parameter.data for parameter in self._parameters]
        try:
            for parameter, host in zip(self._parameters, in_host_memory, strict=True):
                parameter.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
            yield
        finally:
            for parameter, host in zip(self._parameters, in_host_memory, strict=True):
                parameter.data = host


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
