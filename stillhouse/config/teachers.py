"""Several teachers of one student: which of them judges a document, and with which weight."""

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from stillhouse.config.errors import ConfigError
from stillhouse.config.section import Section, Text
from stillhouse.config.teacher import TeacherConfig

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class NamedTeacherConfig(TeacherConfig):
    """One of several teachers. It has the keys of `teacher`, and more; `student` is one more source of signals."""

    sources = (*TeacherConfig.sources, "student")

    student: Literal["live", "ema"] | None = Field(
        default=None,
        description="The student as its own teacher, in eval mode and without gradients. live: with its present"
        " weights; it then needs a prefix. ema: with an exponential moving average of its weights.",
    )
    ema_decay: float = Field(
        default=0.999,
        ge=0,
        lt=1,
        description="With student: ema, the average becomes ema_decay × the average + (1 − ema_decay) × the student's"
        " weights after each step.",
    )
    prefix: Text | None = Field(
        default=None,
        description="Text that only this teacher reads, before the document; `{column}` is filled from the record. In"
        " conversations it becomes a system message of its own.",
        examples=["You know the answer: {answer}. "],
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        description="The teacher's share: the weights of all teachers are divided by their sum. With teachers.route,"
        " a factor of the divergence of its documents.",
    )
    temperature: float | None = Field(
        default=None, gt=0, description="The temperature of this teacher's divergence; null: objective.temperature."
    )

    @model_validator(mode="after")
    def _fits_among_others(self) -> "NamedTeacherConfig":
        if self.cross_tokenizer == "uld":
            raise ConfigError(
                "teacher.cross_tokenizer", "got uld, which is for a single teacher: expected gold or null"
            )
        if self.student is None:
            if self.ema_decay != type(self).model_fields["ema_decay"].default:
                raise ConfigError("teacher.ema_decay", "has an effect only with student: ema")
            if self.prefix is not None and self.cache is not None:
                raise ConfigError("teacher.prefix", "expected null with a cache, whose signals are of other tokens")
            return self
        if self.student == "live" and self.prefix is None:
            raise ConfigError(
                "teacher.prefix", "is missing: without one, the student with its present weights is the student"
            )
        of_weights = ("attention", "revision", "trust_remote_code", "dtype", "quantize", "offload")
        for key in ("parallel", *of_weights, "cross_tokenizer"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ConfigError(f"teacher.{key}", "has no effect with student: the student's own is used")
        return self


class TeachersConfig(Section):
    """Several teachers, each under a name of your choice, with the keys of `teachers.<name>`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, NamedTeacherConfig] = Field(init=False)

    route: Text | None = Field(
        default=None,
        description="The column of the data that names each document's teacher. null: every teacher judges every"
        " document.",
        examples=["subject"],
    )
    sum: Literal["divergences", "distributions"] = Field(
        default="divergences",
        description="Without route: what is summed with the teachers' weights. divergences: each teacher's"
        " divergence. distributions: the teachers' probabilities, from which the student then has one divergence.",
    )

    @property
    def named(self) -> dict[str, NamedTeacherConfig]:
        """In the order of their names, which is the same on all processes, whatever the order in their files."""
        return dict(sorted(self.__pydantic_extra__.items()))

    @model_validator(mode="before")
    @classmethod
    def _has_names(cls, given: Any) -> Any:
        for name in given if isinstance(given, dict) else ():
            if name not in cls.model_fields and not (isinstance(name, str) and NAME.fullmatch(name)):
                raise ConfigError(f"teachers.{name}", "expected a name of letters, digits, - and _, such as math")
        return given

    @model_validator(mode="after")
    def _fit_together(self) -> "TeachersConfig":
        if not self.named:
            raise ConfigError(
                "teachers", "names no teacher; expected one or more, such as math: {model: Qwen/Qwen3-8B}"
            )
        if self.route is not None and self.sum != "divergences":
            raise ConfigError("teachers.sum", "has no effect with teachers.route: every document has one teacher")
        if self.sum == "distributions":
            for name, teacher in self.named.items():
                if teacher.temperature is not None:
                    raise ConfigError(
                        f"teachers.{name}.temperature",
                        "expected null with sum: distributions, because the sum has one divergence:"
                        " set objective.temperature",
                    )
                if teacher.cross_tokenizer is not None:
                    raise ConfigError(
                        f"teachers.{name}.cross_tokenizer",
                        f"got {teacher.cross_tokenizer}, expected null with sum: distributions, which are exact",
                    )
                if teacher.url is not None and teacher.signal != "hidden":
                    raise ConfigError(
                        f"teachers.{name}.signal",
                        f"got {teacher.signal}, expected hidden with sum: distributions, which needs the whole"
                        " vocabulary",
                    )
        return self
