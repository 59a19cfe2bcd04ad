"""Which checkpoints a run writes and keeps, and from which checkpoint it resumes."""

from typing import Annotated, Literal

from pydantic import Field

from stillhouse.config.section import PathText, Section

#: a metric of one of several evaluation sets
OF_A_SET = r"^eval/[A-Za-z0-9_-]+/(cross_entropy|forward_kl|agreement)$"


class CheckpointConfig(Section):
    """Which checkpoints a run writes and keeps, and from which checkpoint it resumes."""

    every: int = Field(
        default=500, ge=0, description="Steps between two checkpoints. 0: only one checkpoint, at the end."
    )
    keep: int = Field(
        default=2, ge=1, description="How many of the latest checkpoints are kept, in addition to the best one."
    )
    best: (
        Literal[
            "eval/cross_entropy",
            "eval/forward_kl",
            "eval/agreement",
            "eval/exact_match/sums",
            "eval/exact_match/reversal",
            "eval/exact_match/brackets",
        ]
        | Annotated[
            str,
            Field(pattern=OF_A_SET, examples=["eval/math/cross_entropy"]),
        ]
        | None
    ) = Field(
        default="eval/cross_entropy",
        description="The checkpoint with the best value of this metric is kept: the lowest, or the highest for"
        " agreement and for the exact match of a task in eval.tasks. eval/name/…: of one of several"
        " sets in data.eval. null: none. No effect without evaluation.",
    )
    resume: PathText = Field(
        default="auto",
        description="auto: resume from the latest checkpoint in out, or start anew if there is none; never: start"
        " anew; a path: start from that checkpoint.",
    )
    fallback: bool = Field(
        default=False,
        description="true: if the latest checkpoint in out is damaged, rename it and resume from the one before it."
        " false: stop with an error that describes the damage.",
    )

    @property
    def best_of_set(self) -> str | None:
        """The name of the evaluation set whose metric is `best`; None if it is not one set's metric."""
        parts = (self.best or "").split("/")
        return parts[1] if len(parts) == 3 and parts[1] != "exact_match" else None

    @property
    def best_needs_teacher(self) -> bool:
        """Whether the metric compares the student with a teacher."""
        return (self.best or "").endswith(("/forward_kl", "/agreement"))
