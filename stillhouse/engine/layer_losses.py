"""Losses of a step that arise within the student's layers, on any stage: of routers and of hidden states."""

import torch
from torch.distributed import ProcessGroup

from stillhouse.data import MicroBatch
from stillhouse.models import HiddenMatchLoss, RouterAuxLoss

#: the key of the routers' load-balancing loss among a step's sums
ROUTER_LOSS = "router_aux"


class RouterAuxLosses:
    """The load-balancing losses of a step's micro-batches.

    scale: the factor of each micro-batch's loss in the step's loss. group: the context ranks, each of which has a
    part of every sequence.
    """

    def __init__(self, scale: float, group: ProcessGroup | None = None):
        self.scale, self.group = scale, group
        self.started: list[RouterAuxLoss] = []

    def start(self, micro_batch: MicroBatch) -> RouterAuxLoss:
        """A new `RouterAuxLoss` for one micro-batch on one stage; the routers of that stage fill in its losses."""
        targets_B = (micro_batch.labels_T >= 0).view(micro_batch.shape_BS).sum(1)
        counts_BS = (micro_batch.document_T >= 0).view(micro_batch.shape_BS)
        self.started.append(RouterAuxLoss(counts_BS, targets_B, self.scale, self.group))
        return self.started[-1]

    def total(self) -> dict[str, float]:
        """The losses of the routers on this process, summed over target tokens, under the key `ROUTER_LOSS`."""
        losses = [loss for each in self.started for loss in each.losses.values()]
        return {ROUTER_LOSS: sum(torch.stack(losses).tolist())} if losses else {}


class HiddenLosses:
    """The hidden-state losses of a step's micro-batches. normalizer: the target tokens of the whole step."""

    def __init__(self, normalizer: float):
        self.normalizer = normalizer
        self.started: list[HiddenMatchLoss] = []

    def start(self, micro_batch: MicroBatch) -> HiddenMatchLoss:
        """A new `HiddenMatchLoss` for one micro-batch on one stage; the layers of that stage fill in its losses."""
        self.started.append(HiddenMatchLoss(micro_batch.weights_T, self.normalizer))
        return self.started[-1]

    def total(self) -> dict[str, float]:
        """The losses of the pairs of layers on this process, summed over target tokens, without their scales."""
        sums: dict[str, float] = {}
        for each in self.started:
            for name, value in each.losses.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums
