"""Keeps frozen weights, of a model or of a teacher's head, in host memory. They are on the device only during use.

V rows of the vocabulary on this process, E width of a teacher.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stillhouse.models import Decoder
from stillhouse.objective import OutputHead


def pin_weights(model: nn.Module, device: torch.device) -> None:
    """Pin a model's weights in host memory if `device` is a GPU. Only a copy from pinned memory has the full speed of
    the bus, and only such a copy runs while this process continues.
    """
    if device.type != "cuda":
        return
    for parameter in model.parameters():
        shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if shard.device.type == "cpu":
            shard.data = shard.data.pin_memory()


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A copy from host memory to a GPU uses pinned memory. Without it, this process
    would wait for the GPU's earlier work.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class WaitingWeights:
    """Keeps the parameters of an unsharded model in host memory, and the model's buffers on the device. The memory on
    the host is never freed, so nothing is copied back from the device.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._device, self._parameters = device, list(model.parameters())  # a tied weight is listed once
        pin_weights(model, device)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the weights to the device until the context ends."""
        held = [(parameter, parameter.data) for parameter in self._parameters]
        try:
            for parameter, host in held:
                parameter.data = torch.empty_like(host, device=self._device).copy_(host, non_blocking=True)
            yield
        finally:
            for parameter, host in held:
                parameter.data = host


@dataclass(frozen=True)
class BufferedHead:
    """A decoder's head in host memory. `opened` copies the head to the device.

    name: the teacher's name
    """

    name: str
    decoder: Decoder
    buffers: "HeadBuffers"

    @contextmanager
    def opened(self) -> Iterator[OutputHead]:
        head = self.decoder.output_head()
        with self.buffers.holding(self.name, head.weight_VD) as weight_VD:
            bias = None if head.bias is None else copied_to(head.bias, weight_VD.device)
            yield replace(head, weight_VD=weight_VD, bias=bias)


class HeadBuffers:
    """Buffers on a device for weights [V, E] in host memory. Weights of equal shape and dtype share a buffer if they
    are not used at the same time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        #: the buffers that are not in use, each with the name of the weight in it, or None if it has no weight
        self._free: list[tuple[str | None, Tensor]] = []

    @contextmanager
    def holding(self, name: str, weight_VE: Tensor) -> Iterator[Tensor]:
        """Yield a buffer with this weight. If a free buffer already has the weight, nothing is copied."""
        kind, held = (weight_VE.shape, weight_VE.dtype), None
        fitting = [at for at, (_, buffer) in enumerate(self._free) if kind == (buffer.shape, buffer.dtype)]
        if fitting:
            at = next((at for at in fitting if self._free[at][0] == name), fitting[0])
            held, buffer = self._free.pop(at)
        else:
            buffer = torch.empty_like(weight_VE, device=self._device, requires_grad=False)
        try:
            if held != name:
                held = None
                # a copy from memory that is not pinned makes this process wait in any case
                buffer.copy_(weight_VE.detach(), non_blocking=weight_VE.is_pinned())
                held = name
            yield buffer
        finally:
            self._free.append((held, buffer))
