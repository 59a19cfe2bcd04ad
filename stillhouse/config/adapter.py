"""The adapter: small matrices that are trained instead of the student's own weights."""

from typing import Annotated, Literal

from pydantic import Field

from stillhouse.config.section import Section, Share, Text


class AdapterConfig(Section):
    """An adapter, which is trained while the student's own weights stay frozen. Needs `stillhouse[lora]`."""

    type: Literal["lora"] = Field(
        default="lora",
        description="lora: (alpha / r) B A x is added to a layer's output W x; only A and B are trained.",
    )
    r: int = Field(default=16, ge=1, description="Rank: A has r rows, and B has r columns.")
    alpha: float = Field(
        default=32.0, gt=0, description="LoRA scale: the adapter's output is multiplied by alpha / r."
    )
    targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = Field(
        default="all-linear",
        description="The layers that get an adapter. all-linear: every linear layer except the head; or a list of"
        " name endings, such as [q_proj, v_proj]. Head and embedding cannot have an adapter.",
    )
    dropout: Share = Field(default=0.0, description="Dropout probability of the adapter's input during training.")
