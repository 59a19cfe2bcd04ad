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


@dataclass(eq=False)
class _Buffer:
    """name: of the weight in the tensor; None: of none. is_used: while a context of `holding` lasts."""

    tensor: Tensor
    name: str | None = None
    is_used: bool = False


class HeadBuffers:
    """Buffers on a device for weights [V, E] that are in host memory. Weights of one shape and dtype share a buffer,
    unless they are used at the same time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers: list[_Buffer] = []

    @contextmanager
    def holding(self, name: str, weight_VE: Tensor) -> Iterator[Tensor]:
        """Yield a buffer with this weight. name: identifies the weight, which is copied only once."""
        buffer = self._free(name, weight_VE)
        buffer.is_used = True
        try:
            if buffer.name != name:
                buffer.name = None
                buffer.tensor.copy_(weight_VE.detach(), non_blocking=True)
                buffer.name = name
            yield buffer.tensor
        finally:
            buffer.is_used = False

    def _free(self, name: str, weight_VE: Tensor) -> _Buffer:
        """The buffer that has this weight already, or a free one of its shape, or a new one."""
        free = [buffer for buffer in self._buffers if not buffer.is_used]
        fits = [
            buffer
            for buffer in free
            if (buffer.tensor.shape, buffer.tensor.dtype) == (weight_VE.shape, weight_VE.dtype)
        ]
        if not fits:
            fits = [_Buffer(torch.empty_like(weight_VE, device=self._device, requires_grad=False))]
            self._buffers += fits
        return next((buffer for buffer in fits if buffer.name == name), fits[0])
