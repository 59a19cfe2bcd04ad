"""What of a run is kept on disk, and where it starts from."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import PathText, Section


class CheckpointConfig(Section):
    """What of a run is kept on disk, and where it starts from."""

    every: int = Field(default=500, ge=0, description="Steps from one checkpoint to the next. 0: at the end only.")
    keep: int = Field(
        default=2, ge=1, description="How many of the latest checkpoints to keep; the best one comes on top."
    )
    best: Literal["eval/cross_entropy", "eval/forward_kl", "eval/agreement"] | None = Field(
        default="eval/cross_entropy",
        description="The metric whose best checkpoint is kept: lowest, or highest for agreement. null: none."
        " No effect without evaluation.",
    )
    resume: PathText = Field(
        default="auto",
        description="auto: from the latest checkpoint in out, or from the start where there is none;"
        " never: from the start; a path: from that checkpoint.",
    )
    fallback: bool = Field(
        default=False,
        description="Go on from the checkpoint before where the latest one in out is damaged; it is renamed, not"
        " removed. false: stop and say what is wrong with it.",
    )
