"""The model that is imitated."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from stillhouse.config.errors import ConfigError
from stillhouse.config.model import ModelConfig
from stillhouse.config.parallel import ParallelConfig
from stillhouse.config.section import PathText, expand_home

#: the folder of a cache with its teacher's configuration, tokenizer and output head
CACHED = "teacher"


class TeacherConfig(ModelConfig):
    """The model that is imitated; it is frozen. It may be absent (null) if the loss has no divergence.

    With `cache`, `model` is the cache's own copy of the teacher's configuration, tokenizer and output head.
    """

    cache: PathText | None = Field(
        default=None,
        description="A folder that `stillhouse cache` has written. The teacher's signals are read from it, and no"
        " teacher runs; teacher.model is then left out. null: the teacher runs in this job.",
    )
    tail: Literal["bucket", "renormalize", "drop"] = Field(
        default="bucket",
        description="How the mass outside of a cache's top-k ids counts. bucket: as one more outcome. renormalize:"
        " not at all, both sides are conditioned on the ids. drop: the sum over the ids only.",
    )

    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        default="auto",
        description="The dtype of the weights; the layers compute in it, too. auto: the dtype of the saved weights.",
    )
    parallel: ParallelConfig | None = Field(
        default=None,
        description="A layout of the teacher's own, over the same processes, with the keys of parallel. The teacher's"
        " hidden states are then sent to the student's processes. null: the student's layout.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_cache(cls, given: Any) -> Any:
        """With a cache, the model's files are those in the cache."""
        if not isinstance(given, dict) or not isinstance(given.get("cache"), str):
            return given
        own = str(Path(expand_home(given["cache"])) / CACHED)
        if given.get("model", own) != own:
            raise ConfigError("teacher.model", "expected either teacher.model or teacher.cache, got both")
        return {**given, "model": own}

    @model_validator(mode="after")
    def _no_layout_of_a_cache(self) -> "TeacherConfig":
        if self.cache is not None and self.parallel is not None:
            raise ConfigError("teacher.parallel", "expected null with teacher.cache: no teacher runs")
        return self
