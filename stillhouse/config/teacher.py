"""The model that is imitated."""

from typing import Literal

from pydantic import Field

from stillhouse.config.model import ModelConfig


class TeacherConfig(ModelConfig):
    """The model that is imitated; frozen. It may be absent (null) where the loss is cross-entropy alone."""

    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        default="auto", description="Type of its weights and of what its layers compute in; auto: as they were saved."
    )
