"""The whole configuration of a run, and the rules between its sections."""

import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from stillhouse.config.checkpoint import KNOWN, CheckpointConfig
from stillhouse.config.data import DataConfig
from stillhouse.config.errors import ConfigError
from stillhouse.config.evaluation import EvalConfig
from stillhouse.config.objective import ObjectiveConfig
from stillhouse.config.parallel import ParallelConfig
from stillhouse.config.rollout import RolloutConfig
from stillhouse.config.section import PathText, Section
from stillhouse.config.student import StudentConfig
from stillhouse.config.teacher import TeacherConfig
from stillhouse.config.teachers import NamedTeacherConfig, TeachersConfig
from stillhouse.config.train import TrainConfig


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
    track: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        default=[],
        description="Trackers that get the metrics in addition to metrics.jsonl and the report. Their own environment"
        " variables choose server and project.",
    )
    out: PathText = Field(
        description="Folder of the run: configuration, metrics, checkpoints, the final model, the report.",
        examples=["runs/qwen3"],
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**32,
        description="Seed of the order of the data, dropout and the adapter. It does not affect which documents are"
        " held out.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|mps|cuda(:[0-9]+)?)$",
        examples=["auto", "cpu", "mps", "cuda", "cuda:1"],
        description="The device to compute on. auto: a CUDA device if there is one, else Apple's GPU (mps, for one"
        " process), else the CPU.",
    )

    @property
    def several(self) -> dict[str, NamedTeacherConfig]:
        """The teachers of the section teachers, by their names; empty if the run has no such section."""
        return {} if self.teachers is None else self.teachers.named

    @property
    def teacher_sections(self) -> dict[str, TeacherConfig]:
        """All teachers, by the dotted keys of their sections."""
        alone = {} if self.teacher is None else {"teacher": self.teacher}
        return alone | {f"teachers.{name}": each for name, each in self.several.items()}

    @property
    def flash_attentions(self) -> list[str]:
        """The settings of flash attention, which separates packed documents only in a batch of one row."""
        sections = {"student": self.student, **self.teacher_sections}
        return [
            f"{name}.attention={section.attention}"
            for name, section in sections.items()
            if "flash" in (section.attention or "")
        ]

    @model_validator(mode="before")
    @classmethod
    def _rollouts_minimise_reverse_kl(cls, given: Any) -> Any:
        """The default loss on the student's own completions."""
        if not isinstance(given, Mapping) or given.get("rollout") is None:
            return given
        objective = given.get("objective", {})
        if not isinstance(objective, Mapping) or "loss" in objective:
            return given
        return {**given, "objective": {"loss": "reverse_kl", **objective}}

    @model_validator(mode="after")
    def _rollouts_fit(self) -> "RunConfig":
        if self.rollout is None:
            return self
        if self.rollout.max_new_tokens > self.data.max_tokens - 2:
            raise ConfigError(
                "rollout.max_new_tokens",
                f"got {self.rollout.max_new_tokens}, which leaves no room for a prompt of two tokens in"
                f" data.max_tokens={self.data.max_tokens}: lower the one or raise the other",
            )
        if self.objective.tokens != "completion":
            raise ConfigError(
                "objective.tokens",
                f"got {self.objective.tokens} with rollout, which trains on completions: expected completion",
            )
        for section, teacher in self.teacher_sections.items():
            if teacher.cache is not None:
                raise ConfigError(
                    f"{section}.cache",
                    "expected null with rollout: a cache has no signals of completions that are"
                    " written during the run",
                )
            if teacher.cross_tokenizer is not None:
                raise ConfigError(f"{section}.cross_tokenizer", "expected null with rollout")
        return self

    @model_validator(mode="after")
    def _hidden_states_are_here(self) -> "RunConfig":
        """Hidden states are compared within a stage, where student and teacher run side by side."""
        if not self.objective.hidden:
            return self
        key = "objective.hidden"
        if self.teacher is None or self.teacher.model is None or self.teacher.url is not None:
            raise ConfigError(key, "needs the teacher's layers in this job: expected teacher.model, and no others")
        for name in ("parallel", "cross_tokenizer", "offload"):
            if getattr(self.teacher, name):
                off = "false" if name == "offload" else "null"
                raise ConfigError(
                    f"teacher.{name}", f"expected {off} with {key}: the teacher has to run in the student's stages"
                )
        if self.rollout is not None:
            raise ConfigError(key, "expected [] with rollout")
        if self.student.mtp is not None and self.student.mtp.train == "heads":
            raise ConfigError(key, "expected [] with student.mtp.train=heads, which freezes the student's layers")
        if self.parallel.schedule == "1f1b_ahead":
            raise ConfigError(
                "parallel.schedule", f"got 1f1b_ahead, which runs the teacher a step ahead: expected 1f1b with {key}"
            )
        return self

    @model_validator(mode="after")
    def _best_is_known(self) -> "RunConfig":
        best, greater = self.checkpoint.best, self.checkpoint.greater_is_better
        if not self.checkpoint.best_of_callback:
            if greater is not None:
                raise ConfigError(
                    "checkpoint.greater_is_better",
                    f"got {str(greater).lower()} with checkpoint.best {best}, of which it is known: expected null",
                )
        elif not self.eval.callbacks:
            raise ConfigError(
                "checkpoint.best",
                f"got {best!r}, expected {', '.join(KNOWN)}, eval/<set>/… of a set in data.eval, or a metric of "
                "eval.callbacks, which is []",
            )
        elif greater is None:
            raise ConfigError(
                "checkpoint.greater_is_better",
                f"expected true or false for checkpoint.best {best}, a metric of yours",
            )
        return self

    @model_validator(mode="after")
    def _sets_exist(self) -> "RunConfig":
        name = self.checkpoint.best_of_set
        if name is not None and name not in self.data.eval_sets:
            sets = ", ".join(self.data.eval_sets) or "no sets with names"
            raise ConfigError("checkpoint.best", f"got {self.checkpoint.best}, but data.eval has {sets}")
        if self.eval.samples and self.data.eval == 0:
            raise ConfigError(
                "eval.samples",
                f"got {self.eval.samples} with data.eval 0: expected held-out data to take prompts from",
            )
        if self.rollout is not None and self.data.mixture:
            raise ConfigError(
                "data.train", "got a list with weights: expected one source with rollout, which draws prompts evenly"
            )
        return self

    @model_validator(mode="after")
    def _cache_is_elsewhere(self) -> "RunConfig":
        """A run's folder must be empty when the run begins, and the data are read before."""
        cache, out = self.data.cache, os.path.abspath(self.out)
        if cache not in (None, "auto") and os.path.commonpath([out, os.path.abspath(cache)]) == out:
            raise ConfigError("data.cache", f"got {cache}, which is in out={self.out}: expected another folder")
        return self

    @model_validator(mode="after")
    def _has_one_kind_of_teachers(self) -> "RunConfig":
        if self.teacher is not None and self.teachers is not None:
            raise ConfigError(
                "teachers", "expected null with teacher: give all teachers under teachers, each by a name"
            )
        return self

    @model_validator(mode="after")
    def _student_can_begin(self) -> "RunConfig":
        init, teacher = self.student.init, self.teacher
        if init is None:
            return self
        if self.student.adapter is not None:
            raise ConfigError(
                "student.init", "expected null with student.adapter, which needs its base's own weights"
            )
        if self.student.mtp is not None:
            raise ConfigError("student.init", "expected null with student.mtp: begin with a run without it")
        if init.source == "teacher" and (teacher is None or teacher.model is None):
            raise ConfigError("student.init.from", "got teacher without teacher.model: expected the teacher's files")
        if init.source == "teacher" and teacher is not None and teacher.cross_tokenizer is not None:
            raise ConfigError(
                "student.init.from", "got teacher with teacher.cross_tokenizer: its embedding is of other tokens"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fit(self) -> "RunConfig":
        """A packed sequence is never split, neither over micro-batches nor over steps."""
        for key, tokens in {
            "train.micro_batch_tokens": self.train.micro_batch_tokens,
            "train.tokens_per_step": self.train.tokens_per_step,
            "eval.micro_batch_tokens": self.eval.micro_batch_tokens,
        }.items():
            if tokens is not None and tokens < self.data.max_tokens:
                raise ConfigError(
                    key,
                    f"got {tokens}, less than data.max_tokens={self.data.max_tokens}: a packed sequence is never"
                    f" split; raise {key} or lower data.max_tokens",
                )
        return self

    @model_validator(mode="after")
    def _flash_packs_one_row(self) -> "RunConfig":
        """transformers separates packed documents under flash attention only in a batch of one row."""
        flash = self.flash_attentions
        for key, tokens in {
            "train.micro_batch_tokens": self.train.micro_batch_tokens,
            "eval.micro_batch_tokens": self.eval.micro_batch_tokens,
        }.items():
            if flash and tokens is not None and tokens >= 2 * self.data.max_tokens:
                raise ConfigError(
                    key,
                    f"got {tokens}, which are {tokens // self.data.max_tokens} packed sequences of "
                    f"data.max_tokens={self.data.max_tokens}: {flash[0]} "
                    "keeps the documents of one sequence apart, not of several; expected less than twice "
                    "data.max_tokens (raise data.max_tokens), or attention sdpa",
                )
        return self

    @model_validator(mode="after")
    def _gathered_as_computed(self) -> "RunConfig":
        self.require_gather_dtype()
        return self

    def require_gather_dtype(self) -> None:
        """Raise ConfigError for a dtype of gathering that is not the one in which the layers compute."""
        if self.parallel.gather_dtype is not None and self.train.precision == "fp32":
            raise ConfigError(
                "parallel.gather_dtype",
                f"got {self.parallel.gather_dtype} with train.precision=fp32, which computes in the weights' own"
                " dtype; expected null, or train.precision=bf16",
            )

    @model_validator(mode="after")
    def _mtp_fits(self) -> "RunConfig":
        """Refuse what multi-token prediction cannot do."""
        mtp, parallel = self.student.mtp, self.parallel
        if mtp is None:
            return self
        cross = [key for key, each in self.teacher_sections.items() if each.cross_tokenizer is not None]
        refused = {
            "student.adapter": (self.student.adapter is not None, "null"),
            "rollout": (self.rollout is not None, "null"),
            "objective.router_aux_loss": (self.objective.router_aux_loss > 0, "0"),
            "parallel.schedule": (
                parallel.pipeline > 1 and parallel.schedule in ("zero_bubble", "zbv"),
                "gpipe, 1f1b, 1f1b_ahead or interleaved",
            ),
            "parallel.expert": (parallel.expert > 1, "1"),
            "parallel.pipeline": (parallel.pipeline > 1 and mtp.train == "heads", "1, or student.mtp.train=all"),
            "teachers.route": (self.teachers is not None and self.teachers.route is not None, "null"),
            **{f"{key}.cross_tokenizer": (True, "null") for key in cross},
        }
        for key, (is_set, expected) in refused.items():
            if is_set:
                raise ConfigError(key, f"this value is not supported with student.mtp: expected {expected}")
        return self
