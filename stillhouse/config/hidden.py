"""A loss between a layer of the student and a layer of the teacher."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import Section


class HiddenPairConfig(Section):
    """A layer of the student that learns the output of a layer of the teacher, at every target token."""

    student: int = Field(description="The student's layer: 0 is the first one, -1 the last one.")
    teacher: int = Field(description="The teacher's layer, numbered in the same way.")
    loss: Literal["mse", "cosine"] = Field(
        default="mse",
        description="mse: the mean squared difference over the width. cosine: 1 minus the cosine.",
    )
    scale: float = Field(default=1.0, gt=0, description="Factor of this loss in the minimised loss.")
