"""scale · Σ (mean over the width of h²) over the target tokens, where h is the output of the first layer."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stillhouse.engine.losses.loss_part import LayerTerm, LossPart
from stillhouse.models.layer_hooks import LayerLossModule, hidden_of, with_loss
from stillhouse.parallel.layer_loss import HookedLoss


@dataclass
class MicroBatchLoss:
    weights_T: Tensor
    factor: float
    losses: dict[str, Tensor] = field(default_factory=dict)


class FirstLayer(LayerLossModule):
    name = "activity"

    def __init__(self, decoder):
        super().__init__()
        decoder.layers()[0].register_forward_hook(self.add_loss)

    def add_loss(self, layer, arguments, output):
        loss, recomputing = self.current.value, self.current.recomputing
        if loss is None or not torch.is_grad_enabled():
            return output
        value = (hidden_of(output).flatten(0, 1).float().square().mean(1) * loss.weights_T).sum()
        if not recomputing:
            loss.losses[self.name] = value.detach()
        return with_loss(output, loss.factor * value)


@dataclass(frozen=True)
class Activity(LossPart):
    scale: float

    key = "objective.activity"

    @classmethod
    def from_config(cls, sections):
        return cls(sections.objective.activity) if sections.objective.activity else None

    @property
    def terms(self):
        return {"activity": LayerTerm(self.scale, "loss/activity_per_token")}

    def prepare(self, decoder, student, teacher):
        decoder.add_layer_loss(FirstLayer(decoder))

    def start(self, micro_batch, student, normalizer):
        loss = MicroBatchLoss(micro_batch.weights_T, self.scale / normalizer)
        return HookedLoss(student.layer_loss(FirstLayer), loss)
