"""Weights of a frozen model that are in host memory, except while the model runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WaitingWeights:
    """The parameters of a model of one process, all of which are in host memory. Its buffers are on the device.

    The host's copies stay where they are: leaving the device frees memory there and copies nothing back. For a GPU
    they are pinned, so that they are copied at the full speed of the bus.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self._device = device
        self._parameters = list(model.parameters())  # a tied weight is listed once
        if device.type == "cuda":
            for each in self._parameters:
                each.data = each.data.pin_memory()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the weights to the device until the context ends."""
        in_host_memory = [each.data for each in self._parameters]
        try:
            for each in self._parameters:
                each.data = torch.empty_like(each.data, device=self._device).copy_(each.data, non_blocking=True)
            yield
        finally:
            for each, host in zip(self._parameters, in_host_memory, strict=True):
                each.data = host
