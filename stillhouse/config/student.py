"""The model that is trained."""

from typing import Literal

from pydantic import Field

from stillhouse.config.adapter import AdapterConfig
from stillhouse.config.model import ModelConfig


class StudentConfig(ModelConfig):
    """The model that is trained."""

    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        default="float32",
        description="Type of the trained weights and of the optimizer's state; what the layers compute in is"
        " train.precision. bfloat16 halves the memory and loses small updates. With an adapter: of the frozen"
        " weights; what is trained then is at least float32.",
    )
    adapter: AdapterConfig | None = Field(
        default=None, description="What is trained in place of the model's own weights. null: those."
    )
