"""Multi-token prediction: further layers of the student, which draft tokens for it in speculative decoding."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import Section, Text


class MtpConfig(Section):
    """Layers behind the student's last one, each of which predicts one token further; they are trained and saved
    with the student. docs/mtp.md explains them.
    """

    depths: int = Field(
        default=1, ge=1, description="Number of the layers: layer k predicts the k-th token after the next one."
    )
    objective: Text | None = Field(
        default=None,
        description="The loss of every depth, in the grammar of objective.loss and at objective.temperature. null:"
        " objective.loss.",
    )
    signal: Literal["teacher", "student"] = Field(
        default="teacher",
        description="The distribution that the depths learn. teacher: the teacher's distribution of the same token;"
        " student: the student's own, without gradients, which is what decides on the drafts in speculative decoding."
        " No effect on cross_entropy.",
    )
    scale: float = Field(
        default=0.3,
        gt=0,
        description="Factor of the depths' loss: the step's loss is that of the student plus scale times the sum over"
        " the depths. With train=heads, AdamW cancels it, but train.clip does not.",
    )
    train: Literal["all", "heads"] = Field(
        default="all",
        description="all: the student and the layers are trained together; heads: the student is frozen, and only the"
        " layers are trained.",
    )
    init: Literal["auto", "new"] = Field(
        default="auto",
        description="auto: the layers of the student's checkpoint if its configuration has a number of them"
        " (num_mtp_layers), else new ones; new: newly initialised layers.",
    )
