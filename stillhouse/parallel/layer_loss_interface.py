"""The interface of a loss that arises inside the student's layers, or at its further depths, beside the objective."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from stillhouse.data import MicroBatch
from stillhouse.models import Decoder
from stillhouse.parallel.apply.context_parallel import NextTokens


class LayerLoss:
    """A loss of one micro-batch on one stage. Its gradient enters the graph where the layer is."""

    def during_teacher(self, teacher: Decoder) -> AbstractContextManager[None]:
        """The context in which the layers of a teacher in the student's stages run."""
        return nullcontext()

    def during_student(self) -> AbstractContextManager[None]:
        """The context in which the student's layers run."""
        return nullcontext()

    def losses(self) -> list[tuple[str, Tensor]]:
        """After the student's forward: names and sums over target tokens, without scales."""
        return []


class LayerLosses(Protocol):
    """Starts the loss of each micro-batch on a stage."""

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        """Further arguments of the student's forward. student: the part on this stage."""
        return {}

    def start(self, micro_batch: MicroBatch, student: Decoder, normalizer: float) -> LayerLoss:
        """Start the loss of a micro-batch. student: the part on this stage. normalizer: the step's target tokens."""
        return LayerLoss()


@dataclass(frozen=True)
class MtpLayersRun(LayerLosses):
    """Runs the student's layers of multi-token prediction, on the stage that has its head, and adds no loss.

    next_tokens: appends the next tokens to a context rank's columns of the token ids.
    """

    next_tokens: NextTokens

    def student_inputs(self, micro_batch: MicroBatch, student: Decoder) -> Mapping[str, Tensor]:
        return {"mtp_input_ids": self.next_tokens(micro_batch.input_ids_BS)} if student.has_head else {}
