"""The interface of losses beside the objective: they arise inside the student's layers or at its MTP depths."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.models import Decoder
from stillhouse.models.layer_hooks import LayerLossModule
from stillhouse.parallel.apply.context_parallel import NextTokens


class LayerLoss:
    """A loss of one micro-batch on one stage. Its gradient enters the autograd graph at the layer."""

    def during_teacher(self, teacher: Decoder) -> AbstractContextManager[None]:
        """The context in which the layers of a teacher in the student's stages run."""
        return nullcontext()

    def during_student(self) -> AbstractContextManager[None]:
        """The context in which the student's layers run."""
        return nullcontext()

    def losses(self) -> list[tuple[str, Tensor]]:
        """To be called after the student's forward: the losses' names, and unscaled sums over target tokens."""
        return []


@dataclass(frozen=True)
class HookedLoss(LayerLoss):
    """A loss that hooks compute. loss: its inputs and results, which become values of its dict `losses`."""

    module: LayerLossModule
    loss: Any

    def during_student(self) -> AbstractContextManager[None]:
        return self.module.using(self.loss)

    def losses(self) -> list[tuple[str, Tensor]]:
        return list(self.loss.losses.items())


class LayerLosses(Protocol):
    """Creates the `LayerLoss` of each micro-batch on a stage."""

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        """Additional arguments of the student's forward. student: the part on this stage."""
        return {}

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> LayerLoss:
        """Start a micro-batch's loss. student: the part on this stage. normalizer: the step's target tokens."""
        return LayerLoss()


@dataclass(frozen=True)
class MtpLayersRun(LayerLosses):
    """Runs the student's MTP layers on the stage that has the student's head, and adds no loss.

    next_tokens: appends to a context rank's columns of token ids the tokens that follow them.
    """

    next_tokens: NextTokens

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        return {"mtp_input_ids": self.next_tokens(micro_batch.input_ids_BS)} if student.has_head else {}
