"""The model that is imitated."""

from typing import Literal

from pydantic import Field

from stillhouse.config.model import ModelConfig
from stillhouse.config.parallel import ParallelConfig


class TeacherConfig(ModelConfig):
    """The model that is imitated; frozen. It may be absent (null) where the loss is cross-entropy alone."""

    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        default="auto", description="Type of its weights and of what its layers compute in; auto: as they were saved."
    )
    parallel: ParallelConfig | None = Field(
        default=None,
        description="A layout of its own, with the keys of parallel, over the same processes; its hidden"
        " states travel to where the student's are. null: the student's layout.",
    )
