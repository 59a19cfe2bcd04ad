"""The interface of a loss beside the objective: what the engine, the stages and the head ask of it."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from stillhouse.models.processor_targets import DistillTargets
from stillhouse.objective import ObjectiveOutput, OutputHead
from stillhouse.parallel.layer_loss_interface import LayerLosses


class LossPart(LayerLosses, Protocol):
    """A loss beside the objective. It is immutable; the loss of each micro-batch is an object of its own.

    key: of the configuration.
    needs_teacher: whether a step with it needs a teacher's signals.
    """

    @property
    def key(self) -> str: ...

    @property
    def needs_teacher(self) -> bool: ...

    def at_head(
        self,
        loss: Any,
        output: ObjectiveOutput,
        hidden_by_depth: Sequence[Tensor],
        head: OutputHead,
        context: DistillTargets,
    ) -> ObjectiveOutput:
        """Add what is computed at the head, beside the objective.

        loss: the `StepLoss`.
        output: that of the objective.
        hidden_by_depth: the hidden states [B, S, D] of depths 0, 1, ….
        """
        return output

    def add_to(self, sums: dict[str, float]) -> None:
        """Add to the step's loss, sums["loss"], what arises in the layers. sums: of all processes."""
        return
