"""The loss between hidden states of student and teacher (`models/hidden_match.py`) as a part of the step's loss."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.engine.parts.loss_part import LossPart, LossSections
from stillhouse.models import Decoder, HiddenMatchLoss, HiddenPair, recorded
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss_interface import LayerLoss


@dataclass(frozen=True)
class HiddenStates(LossPart):
    """pairs: the pairs of layers of student and teacher, on all stages; empty before `distributed`."""

    pairs: tuple[HiddenPair, ...] = ()

    key = "objective.hidden"
    needs_teacher = True

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        return cls() if sections.objective.hidden else None

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        pairs = sections.objective.hidden
        return "".join(f" + {one.scale:g}*{one.loss} of layers {one.student} and {one.teacher}" for one in pairs)

    def distributed(self, student: DistributedStudent) -> Self:
        match = student.decoders[0].hidden_match
        assert match is not None
        return replace(self, pairs=match.all_pairs)

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> "_LayersOfStage":
        return _LayersOfStage(student, HiddenMatchLoss(micro_batch.weights_T, normalizer))

    def add_to(self, sums: dict[str, float]) -> None:
        for pair in self.pairs:
            sums["loss"] += pair.scale * sums.get(pair.name, 0.0) / max(1.0, sums["tokens"])


@dataclass(frozen=True)
class _LayersOfStage(LayerLoss):
    student: Decoder
    loss: HiddenMatchLoss

    def during_teacher(self, teacher: Decoder) -> AbstractContextManager[None]:
        assert self.student.hidden_match is not None
        return recorded(teacher, self.student.hidden_match.teacher_layers, self.loss.teacher_BSE)

    def during_student(self) -> AbstractContextManager[None]:
        return self.student.matching(self.loss)

    def losses(self) -> list[tuple[str, Tensor]]:
        return list(self.loss.losses.items())
