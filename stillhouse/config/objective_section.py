"""The objective: the loss that training minimises."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stillhouse.config.section import Removed, Section, Text, keys_of_add_ons
from stillhouse.objective.expression import NO_GAIN


class HiddenPairConfig(Section):
    """A layer of the student that is trained to match the output of a teacher's layer, at every target token."""

    student: int
    """The student's layer: 0 is the first one, -1 the last one."""
    teacher: int
    """The teacher's layer, numbered in the same way."""
    loss: Literal["mse", "cosine"] = "mse"
    """mse: the mean squared difference over the width. cosine: 1 minus the cosine."""
    scale: float = Field(default=1.0, gt=0)
    """Coefficient of this loss in the minimised loss."""


class ByOriginConfig(Section):
    """Objectives in place of objective.loss: one objective for each origin that the documents of a step have."""

    dataset: Text | None = None
    """The objective of the dataset's own completions: a sum as in objective.loss. A step has such completions if
    rollout.share is below 1."""
    student: Text | None = None
    """The objective of the student's completions, with rollout.writer=student."""
    teacher: Text | None = None
    """The objective of the teacher's completions, with rollout.writer=teacher."""

    @property
    def losses(self) -> dict[str, str]:
        """The objectives that are set, by origin."""
        return {origin: loss for origin, loss in self.model_dump().items() if loss is not None}


if TYPE_CHECKING:
    _PartKeys = Section
else:  # other distributions can register losses inside layers; their keys are added to this section
    _PartKeys = keys_of_add_ons("stillhouse.parts", "objective")


class ObjectiveConfig(_PartKeys):
    """The objective: the mean loss per target token, which training minimises."""

    removed: ClassVar[Removed] = {"token_gate": (None, NO_GAIN)}

    loss: Text = "forward_kl"
    """A sum of cross_entropy and divergences with coefficients, such as 0.3*cross_entropy + 0.7*jsd(0.5); the
    divergences are listed in docs/objective.md. Without this key, a run with the section rollout has reverse_kl."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of student and teacher in divergences, and the student's logits in entropy. No effect
    on cross_entropy."""
    scale_by_temperature_squared: bool = False
    """Multiply divergences by the temperature squared. No effect at temperature 1."""
    tokens: Literal["completion", "all"] = "completion"
    """The target tokens. completion: the tokens of completions and assistant turns. all: also the tokens of prompts.
    No effect on records with the column text."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of a student with experts, which is computed per packed sequence and
    averaged over layers. 0: off. The model's own router_aux_loss_coef is ignored."""
    hidden: list[HiddenPairConfig] = Field(default=[])
    """Additional losses between hidden states: a list such as [{student: 5, teacher: 11, loss: cosine, scale: 0.1}].
    A trained matrix maps the student's width to the teacher's width. Needs a teacher that runs in the student's
    pipeline stages. docs/objective.md explains the keys."""
    by_origin: ByOriginConfig | None = None
    """An objective for each origin, such as {dataset: skew_forward_kl(0.1), student: skew_reverse_kl(0.1)}. Needs the
    section rollout."""
    chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a tile of logits; one tile at a time is in memory. Affects memory and speed, never the loss. null:
    chosen by a memory budget of 1 GiB on a GPU and 256 MiB on a CPU. Each dense teacher has another tile, and tensor
    parallelism doubles them."""
    kernels: Literal["auto", "compiled", "triton"] = "auto"
    """How a GPU computes all operations of the objective except matrix products. auto: with Triton kernels if they
    support the loss and agree with float64 at the first step, otherwise with torch.compile. compiled: with
    torch.compile. triton: like auto, but kernels that do not agree end the run. No effect on a CPU. In
    each case, the loss is compiled once for each expression and temperature, which can take a minute."""

    @property
    def losses(self) -> dict[str, str]:
        """The expressions of the objective, by their keys: `objective.loss`, or a key for each origin."""
        if self.by_origin is None:
            return {"objective.loss": self.loss}
        return {f"objective.by_origin.{origin}": loss for origin, loss in self.by_origin.losses.items()}
