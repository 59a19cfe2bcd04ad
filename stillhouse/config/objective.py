"""What is minimised."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import Section, Text


class ObjectiveConfig(Section):
    """What is minimised, per predicted token."""

    loss: Text = Field(
        default="forward_kl",
        description="A sum of cross_entropy and divergences with coefficients, such as 0.3*cross_entropy +"
        " 0.7*jsd(0.5); the divergences are listed in docs/objective.md.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        description="Divides both sides' logits in divergences, and the student's in entropy; not in cross_entropy.",
    )
    scale_by_temperature_squared: bool = Field(
        default=False, description="Multiply divergences by the temperature squared. No effect at temperature 1."
    )
    tokens: Literal["completion", "all"] = Field(
        default="completion",
        description="Which tokens are predicted: completions and assistant turns, or prompts as well."
        " No effect on text.",
    )
    router_aux_loss: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the load-balancing loss of a student with experts (router_aux_loss_coef of its"
        " configuration is not read): per packed sequence, mean over layers. 0: off.",
    )
    chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Rows of logits that exist at a time: memory and speed, never the loss."
        " null: from a memory budget.",
    )
