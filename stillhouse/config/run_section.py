"""The whole configuration of a run."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from stillhouse.config.data_section import DataConfig, source_prefix
from stillhouse.config.evaluation_section import CheckpointConfig, EvalConfig
from stillhouse.config.objective_section import ObjectiveConfig
from stillhouse.config.parallel_section import ParallelConfig
from stillhouse.config.rollout_section import RolloutConfig
from stillhouse.config.section import PathText, Registered, Section
from stillhouse.config.student_section import StudentConfig
from stillhouse.config.teacher_section import NamedTeacherConfig, TeacherConfig, TeachersConfig
from stillhouse.config.train_section import TrainConfig


class RunConfig(Section):
    """The whole configuration of a run."""

    student: StudentConfig
    teacher: TeacherConfig | None = None
    teachers: TeachersConfig | None = None
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    rollout: RolloutConfig | None = None
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    track: list[Annotated[str, Registered("stillhouse.trackers")]] = Field(default=[])
    """Trackers that get the metrics in addition to metrics.jsonl and the report. Each tracker's own environment
    variables choose the server and the project."""
    out: PathText = Field(examples=["runs/qwen3"])
    """Folder of the run, for its configuration, metrics, checkpoints, final model and report."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed for the order of the data, dropout and the adapter. It does not affect which documents are held out."""
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$", examples=["auto", "cpu", "mps", "cuda", "cuda:1"]
    )
    """The device to compute on. auto: a CUDA device if there is one, otherwise Apple's GPU (mps, one process), or
    the CPU."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that a resumed run on a GPU equals an uninterrupted run bit for bit. This
    is slower. No effect on a CPU, where a resumed run always equals an uninterrupted run."""

    @property
    def several(self) -> dict[str, NamedTeacherConfig]:
        """The teachers of the section teachers, by their names; empty if the run has no such section."""
        return {} if self.teachers is None else self.teachers.named

    @property
    def teacher_sections(self) -> dict[str, TeacherConfig]:
        """All teachers, by the dotted keys of their sections."""
        single = {} if self.teacher is None else {"teacher": self.teacher}
        return single | {f"teachers.{name}": teacher for name, teacher in self.several.items()}

    @property
    def rollouts(self) -> list[RolloutConfig]:
        """The section rollout for the prompts of each source of data.train; empty if the run has no such section."""
        if self.rollout is None:
            return []
        by_source = [self.rollout.for_source(source.rollout) for source in self.data.weighted_sources]
        return by_source or [self.rollout]

    @property
    def losses(self) -> dict[str, str]:
        """The expressions of all objectives, by their keys."""
        mtp = self.student.mtp
        at_depths = {} if mtp is None or mtp.objective is None else {"student.mtp.objective": mtp.objective}
        return self.objective.losses | at_depths

    def rollout_key(self, source: int, name: str) -> str:
        """Return the full key that sets a key of rollout for the prompts of a source of data.train.

        source: the number of the source, from 0.
        """
        return f"{source_prefix(self.data.weighted_sources, source, name)}rollout.{name}"

    @model_validator(mode="before")
    @classmethod
    def _rollouts_minimise_reverse_kl(cls, content: Any) -> Any:
        """Set reverse_kl as the default loss of a run with the section rollout."""
        if not isinstance(content, Mapping) or content.get("rollout") is None:
            return content
        objective = content.get("objective", {})
        if not isinstance(objective, Mapping) or "loss" in objective or objective.get("by_origin") is not None:
            return content
        return {**content, "objective": {"loss": "reverse_kl", **objective}}
