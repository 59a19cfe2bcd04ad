"""The interface of a loss beside the objective, for the configuration, the engine, the stages and the head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor

from stillhouse.config import ObjectiveConfig, StudentConfig
from stillhouse.models.processor_targets import DistillTargets
from stillhouse.objective import ObjectiveOutput, OutputHead
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss_interface import LayerLosses


@dataclass(frozen=True)
class LossSections:
    """The configuration's sections about losses, the parsed `objective.loss`, and whether the run has a teacher."""

    objective: ObjectiveConfig
    student: StudentConfig
    spec: ObjectiveSpec
    has_teacher: bool


class LossPart(LayerLosses, Protocol):
    """A loss beside the objective. It is immutable; each micro-batch has its own `LayerLoss`.

    key: the loss's key in the configuration.
    needs_teacher: whether a step with this loss needs a teacher's signals.
    """

    @property
    def key(self) -> str: ...

    @property
    def needs_teacher(self) -> bool: ...

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        """Return the configured loss; None if none is configured. Raises ConfigError for an impossible loss."""
        ...

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        """Return this loss's part of the objective's description in words."""
        return ""

    def distributed(self, student: DistributedStudent) -> Self:
        """Return the loss for a student that is distributed over a mesh."""
        return self

    def at_head(
        self,
        loss: Any,
        output: ObjectiveOutput,
        hidden_by_depth: Sequence[Tensor],
        head: OutputHead,
        context: DistillTargets,
    ) -> ObjectiveOutput:
        """Add the part of this loss that is computed at the head to the objective's output.

        loss: the `StepLoss`.
        output: the objective's output.
        hidden_by_depth: the hidden states [B, S, D] of depths 0, 1, ….
        """
        return output

    def add_to(self, sums: dict[str, float]) -> None:
        """Add to sums["loss"] the part of this loss that arises in the layers. sums: the sums of all processes."""
        return
