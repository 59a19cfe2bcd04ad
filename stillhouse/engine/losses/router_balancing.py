"""The loss that balances experts (`models/router_balancing.py`) as a part of the step's loss."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor
from torch.distributed import ProcessGroup

from stillhouse.config import StudentConfig, TeacherConfig, as_config_error
from stillhouse.data import MicroBatch
from stillhouse.engine.losses.loss_part import LayerTerm, LossPart, LossSections
from stillhouse.models import Decoder, RouterAuxLoss, balance_routers
from stillhouse.models.router_balancing import RouterBalance
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss import HookedLoss

#: the key of the routers' load-balancing loss among a step's sums
ROUTER_LOSS = "router_aux"


@dataclass(frozen=True)
class RouterBalancing(LossPart):
    """The load-balancing loss of the student's routers. group: see `MtpLoss`."""

    coefficient: float
    group: ProcessGroup | None = None

    key = "objective.router_aux_loss"

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        coefficient = sections.objective.router_aux_loss
        return cls(coefficient) if coefficient else None

    def prepare(self, decoder: Decoder, student: StudentConfig, teacher: TeacherConfig | None) -> None:
        with as_config_error(self.key):
            balance_routers(decoder)

    def distributed(self, student: DistributedStudent) -> Self:
        return replace(self, group=student.mesh.group("context"))

    @property
    def terms(self) -> Mapping[str, LayerTerm]:
        return {ROUTER_LOSS: LayerTerm(self.coefficient, f"loss/{ROUTER_LOSS}")}

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> "_RoutersOfStage":
        targets_B = (micro_batch.labels_T >= 0).view(micro_batch.shape_BS).sum(1)
        counts_BS = (micro_batch.document_T >= 0).view(micro_batch.shape_BS)
        loss = RouterAuxLoss(counts_BS, targets_B, self.coefficient / normalizer, self.group)
        return _RoutersOfStage(student.layer_loss(RouterBalance), loss)


class _RoutersOfStage(HookedLoss):
    def losses(self) -> list[tuple[str, Tensor]]:
        return [(ROUTER_LOSS, value) for value in self.loss.losses.values()]
