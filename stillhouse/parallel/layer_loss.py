"""The interface of losses inside the student's layers or at its MTP depths; `engine/losses/` has the losses."""

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
    """A loss of one micro-batch on one stage. Its gradient is added in the backward of the student's layers."""

    def during_teacher(self, teacher: Decoder) -> AbstractContextManager[None]:
        """Return the context in which the teacher's layers on this stage run."""
        return nullcontext()

    def during_student(self) -> AbstractContextManager[None]:
        """Return the context in which the student's layers on this stage run."""
        return nullcontext()

    def losses(self) -> list[tuple[str, Tensor]]:
        """Return the names and values of the losses, after the student's forward. A value is a sum over target
        tokens, without the loss's factor.
        """
        return []


@dataclass(frozen=True)
class HookedLoss(LayerLoss):
    """A loss that hooks in the layers compute. loss: the hooks' inputs, and a dict `losses` for the hooks' results"""

    module: LayerLossModule
    loss: Any

    def during_student(self) -> AbstractContextManager[None]:
        return self.module.using(self.loss)

    def losses(self) -> list[tuple[str, Tensor]]:
        return list(self.loss.losses.items())


class LayerLosses(Protocol):
    """Creates the `LayerLoss` of each micro-batch on a stage."""

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        """Return additional arguments for the forward of `student`, the student's part on this stage."""
        return {}

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> LayerLoss:
        """Start a micro-batch's loss. normalizer: the number of target tokens of the step"""
        return LayerLoss()


@dataclass(frozen=True)
class MtpLayersRun(LayerLosses):
    """Runs the student's MTP layers on the stage with the head, without a loss.

    next_tokens: appends the ids of the next columns.
    """

    next_tokens: NextTokens

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        return {"mtp_input_ids": self.next_tokens(micro_batch.input_ids_BS)} if student.has_head else {}
