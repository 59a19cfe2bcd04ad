"""The interface of a loss beside the objective, for the configuration, the engine, the stages and the head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from stillhouse.config import ObjectiveConfig, StudentConfig, TeacherConfig
from stillhouse.models import Decoder
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


class LayerTerm(NamedTuple):
    """The factor of a term's mean in the step's loss, and the mean's metric key; in nats: `…_nats_per_token`."""

    scale: float
    metric: str


class LossPart(LayerLosses, Protocol):
    """An immutable loss beside the objective. Each micro-batch has its own `LayerLoss`. key: in the configuration."""

    key: ClassVar[str]

    @property
    def needs_teacher(self) -> bool:
        """Whether a step with this loss needs a teacher's signals."""
        return False

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        """Return the configured loss; None if none is configured. Raises ConfigError for an impossible loss."""
        ...

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        """Return this loss's part of the objective's description in words."""
        return ""

    def prepare(self, decoder: Decoder, student: StudentConfig, teacher: TeacherConfig | None) -> None:
        """Add a `LayerLossModule`, without values, to the unsharded student. Raises ConfigError if impossible."""

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

    @property
    def terms(self) -> Mapping[str, LayerTerm]:
        """The terms in `LayerLoss.losses`, of all stages, by their names."""
        return {}

    def held_out(self) -> Self | None:
        """Return the loss that is measured on held-out documents, if any."""
        return None

    def silent(self) -> Self | None:
        """Return the loss with the factor 0, if its layers must also run in a step without it."""
        return None

    def check_rows(self, decoder: Decoder, student: StudentConfig) -> Mapping[str, str]:
        """Return what `stillhouse check` prints about it. decoder: the part of the student in this process."""
        return {}
