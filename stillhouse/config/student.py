"""The model that is trained."""

from typing import Literal

from pydantic import Field

from stillhouse.config.model import ModelConfig


class StudentConfig(ModelConfig):
    """The model that is trained."""

    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="Type of the trained weights and of the optimizer's state; what the layers compute in is"
        " train.precision. bfloat16 halves the memory and loses small updates.",
    )
