"""Small matrices that are trained in place of the student's own weights."""

from typing import Annotated, Literal

from pydantic import Field

from stillhouse.config.section import Section, Share, Text


class AdapterConfig(Section):
    """What is trained in place of the student's own weights, which stay as they are. Needs `stillhouse[lora]`."""

    type: Literal["lora"] = Field(
        default="lora", description="lora: to a layer's W x comes (alpha / r) B A x; A and B alone are trained."
    )
    r: int = Field(default=16, ge=1, description="Rank: A has r rows, B r columns.")
    alpha: float = Field(default=32.0, gt=0, description="Weight of what comes to a layer, times r.")
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="all-linear",
        description="The layers that get one. all-linear: every linear layer but the head; or the ends of their"
        " names, such as [q_proj, v_proj]. Never head or embedding.",
    )
    dropout: Share = Field(default=0.0, description="Share of a layer's inputs that A does not see in training.")
