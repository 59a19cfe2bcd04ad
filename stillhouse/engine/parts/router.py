"""The load-balancing loss of the student's routers (`models/moe.py`) as a part of the step's loss."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor
from torch.distributed import ProcessGroup

from stillhouse.data import MicroBatch
from stillhouse.engine.parts.loss_part import LossPart, LossSections
from stillhouse.models import Decoder, RouterAuxLoss
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss_interface import LayerLoss

#: the key of the routers' load-balancing loss among a step's sums
ROUTER_LOSS = "router_aux"


@dataclass(frozen=True)
class RouterBalancing(LossPart):
    """coefficient: the factor of the loss.
    group: the context ranks, over which sequences are sharded; None: this process has full sequences.
    """

    coefficient: float
    group: ProcessGroup | None = None

    key = "objective.router_aux_loss"
    needs_teacher = False

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        coefficient = sections.objective.router_aux_loss
        return cls(coefficient) if coefficient else None

    def distributed(self, student: DistributedStudent) -> Self:
        return replace(self, group=student.mesh.group("context"))

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> "_RoutersOfStage":
        targets_B = (micro_batch.labels_T >= 0).view(micro_batch.shape_BS).sum(1)
        counts_BS = (micro_batch.document_T >= 0).view(micro_batch.shape_BS)
        return _RoutersOfStage(
            student, RouterAuxLoss(counts_BS, targets_B, self.coefficient / normalizer, self.group)
        )

    def add_to(self, sums: dict[str, float]) -> None:
        sums["loss"] += self.coefficient * sums.get(ROUTER_LOSS, 0.0) / max(1.0, sums["tokens"])


@dataclass(frozen=True)
class _RoutersOfStage(LayerLoss):
    student: Decoder
    loss: RouterAuxLoss

    def during_student(self) -> AbstractContextManager[None]:
        return self.student.balancing(self.loss)

    def losses(self) -> list[tuple[str, Tensor]]:
        return [(ROUTER_LOSS, value) for value in self.loss.losses.values()]
