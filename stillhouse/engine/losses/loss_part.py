"""The interface of the losses that are added to the objective.

A `PartKind` registers a loss (`engine/loss_part_kinds.py`). Its hooks in the student's layers are a `LayerLossModule`
in `models/`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor

from stillhouse.config import ObjectiveConfig, StudentConfig, TeacherConfig, as_config_error
from stillhouse.config.section import function_hint
from stillhouse.models import Decoder
from stillhouse.models.processors import DistillTargets
from stillhouse.objective import ObjectiveOutput, OutputHead
from stillhouse.objective.expression import class_paths
from stillhouse.objective.spec import ObjectiveSpec, read_objective
from stillhouse.parallel import DistributedStudent
from stillhouse.parallel.layer_loss import LayerLosses
from stillhouse.registry import load_all
from stillhouse.user_code.functions import load_object


def configured_objective(
    key: str, loss: str, temperature: float = 1.0, scale_by_temperature_squared: bool = False
) -> ObjectiveSpec:
    """Parse the loss of a key of the configuration, which can name registered divergences and users' classes.

    Raises ConfigError for a loss that cannot be read, and for a class that cannot be imported or is wrong.
    """
    with as_config_error(key):
        classes = {path: load_object(path, function_hint(path)) for path in class_paths(loss)}
        kinds = load_all("stillhouse.divergences") | classes
        return read_objective(loss, kinds, temperature, scale_by_temperature_squared)


@dataclass(frozen=True)
class LossSections:
    """The parts of the configuration that a loss reads. spec: the parsed `objective.loss`."""

    objective: ObjectiveConfig
    student: StudentConfig
    spec: ObjectiveSpec
    has_teacher: bool


class LayerTerm(NamedTuple):
    """A term of the step's loss. scale: the factor of the term's mean. metric: the metric key of this mean."""

    scale: float
    metric: str


class LossPart(LayerLosses, Protocol):
    """An immutable loss that is added to the objective. `start` returns the state of the loss for a micro-batch.

    key: the configuration key of the loss.
    """

    key: ClassVar[str]

    @property
    def needs_teacher(self) -> bool:
        return False

    @classmethod
    def from_config(cls, sections: LossSections) -> Self | None:
        """Return the configured loss; None if none is configured. Raises ConfigError for an invalid configuration."""
        ...

    @classmethod
    def in_words(cls, sections: LossSections) -> str:
        """Return the text about this loss in the printed description of the objective; "" for no text."""
        return ""

    def prepare(self, decoder: Decoder, student: StudentConfig, teacher: TeacherConfig | None) -> None:
        """Add the modules of this loss, uninitialised, to the unsharded student. Raises ConfigError for a model that
        does not support the loss.
        """

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
        """Return the objective's output plus the part of this loss that is computed at the head.

        loss: the `StepLoss`. hidden_by_depth: the hidden states [B, S, D] of depths 0, 1, ….
        """
        return output

    @property
    def terms(self) -> Mapping[str, LayerTerm]:
        """The terms that `LayerLoss.losses` reports on any stage, by their names."""
        return {}

    def held_out(self) -> Self | None:
        """Return the loss to measure on held-out documents, or None if there is none."""
        return None

    def silent(self) -> Self | None:
        """Return this loss with factor 0 if its layers must also run in a step without the loss, and None if not."""
        return None

    def check_rows(self, decoder: Decoder, student: StudentConfig) -> Mapping[str, str]:
        """Return titles and texts of rows for `stillhouse check`. decoder: the student's part on this process."""
        return {}
