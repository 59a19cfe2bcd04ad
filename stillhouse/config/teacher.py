"""The model that is imitated."""

from typing import Literal

from pydantic import Field

from stillhouse.config.model import ModelConfig
from stillhouse.config.parallel import ParallelConfig


class TeacherConfig(ModelConfig):
    """The model that is imitated; it is frozen. It may be absent (null) if the loss has no divergence."""

    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        default="auto",
        description="The dtype of the weights; the layers compute in it, too. auto: the dtype of the saved weights.",
    )
    parallel: ParallelConfig | None = Field(
        default=None,
        description="A layout of the teacher's own, over the same processes, with the keys of parallel. The teacher's"
        " hidden states are then sent to the student's processes. null: the student's layout.",
    )
