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
        names = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else None
        if names == []:
            raise ValueError("names no teacher; expected one or more, such as math: {model: Qwen/Qwen3-8B}")
        for name in names or ():
            if not (isinstance(name, str) and NAME.fullmatch(name)):
                raise ConfigError(name, "expected a name of letters, digits, - and _, such as math")
        return given
