"""How a run is spread over processes."""

import math

from pydantic import Field, model_validator

from stillhouse.config.errors import ConfigError
from stillhouse.config.section import Section


class ParallelConfig(Section):
    """How a run is spread over processes. This version runs in one: every degree is 1."""

    fsdp: int = Field(
        default=1,
        ge=1,
        description="Processes that share weights, gradients and optimizer state, and split the data.",
    )
    tensor: int = Field(default=1, ge=1, description="Processes that share each matrix, the vocabulary's included.")
    pipeline: int = Field(default=1, ge=1, description="Stages of consecutive layers.")
    context: int = Field(default=1, ge=1, description="Processes that share each sequence.")
    replicate: int = Field(default=1, ge=1, description="Whole copies of the layout above, which split the data.")

    @model_validator(mode="after")
    def _one_process(self) -> "ParallelConfig":
        degrees = {name: degree for name, degree in self if degree != 1}
        if degrees:
            asked = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
            raise ConfigError(
                f"parallel.{next(iter(degrees))}",
                f"got {asked} = {math.prod(degrees.values())} processes; this version runs in one, expected 1",
            )
        return self
