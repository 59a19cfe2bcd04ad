"""The teachers and the sources of their signals: one teacher, or several teachers with names."""

import re
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from stillhouse.config.errors import ConfigError, MissingKeyError, removed_value
from stillhouse.config.parallel_section import ParallelConfig
from stillhouse.config.section import PathText, Removed, Section, Text, Urls, keys_of_add_ons, text_list
from stillhouse.config.servers import ApiName, VariableName
from stillhouse.config.signal_source_kind import GROUP, SourceKind, source_kinds
from stillhouse.config.student_section import ModelConfig, StudentConfig
from stillhouse.objective.expression import NO_GAIN

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")

if TYPE_CHECKING:
    _SourceKeys = Section
else:  # other distributions can register sources; each source is a key of this section, with a text as value
    _SourceKeys = keys_of_add_ons(GROUP, "teacher", PathText | None, "A source of signals from {distribution}.")


class TeacherConfig(ModelConfig, _SourceKeys):
    """The frozen model that the student imitates. It may be absent (null) if the loss has no divergence.

    One of `model` (the teacher runs in this job), `cache` and `url` sets the source of its signals.
    """

    model: PathText | None = Field(default=None, examples=["Qwen/Qwen3-8B"])
    """Hugging Face id, the path of a folder with config.json, safetensors and tokenizer, or a GGUF, as in
    student.model. With url and hidden states, the tokenizer and output head are read from this model if the server
    does not offer them."""
    cache: PathText | None = None
    """A folder that `stillhouse cache` has written. The teacher's signals are read from it, and no teacher runs;
    teacher.model is then left out."""
    url: Urls = Field(default=None, examples=["http://10.0.0.7:8000"])
    """The address of a server that runs the teacher, or a list of addresses. See api for the kinds of servers."""
    token_variable: VariableName | None = Field(default=None, examples=["TEACHER_TOKEN"])
    """The environment variable with the bearer token of the servers at url. null: STILLHOUSE_TOKEN, if it is set. If
    the run also has servers of another model, set token_variable in the section of each of these models, so that
    no server gets another server's token."""
    api: ApiName = "auto"
    """The interface of the server at url. auto: detected."""
    signal: Literal["hidden", "top_k", "chosen", "sampled"] = "hidden"
    """The signal that is requested from the server. hidden: hidden states, which give the exact distribution at every
    temperature. top_k: the teacher's top ids. chosen: the teacher's log-probabilities of the student's top ids.
    sampled: samples from the teacher."""
    cross_tokenizer: Annotated[Literal["gold"] | None, removed_value("uld", NO_GAIN, "gold or null")] = None
    """For a teacher with another tokenizer: how its distribution over the student's tokens is approximated. gold:
    merged probabilities of the spans of text on which both tokenizers agree. null: the teacher must have the
    student's tokenizer, and nothing is approximated."""
    top_k: int = Field(default=64, ge=1)
    """The number of ids per token for the signals top_k and chosen, and of samples per token for sampled. With
    cross_tokenizer, the number of the teacher's top ids per token."""
    tail: Literal["bucket", "renormalize", "drop"] = "bucket"
    """The treatment of the mass outside of the ids of top_k and chosen. bucket: the mass is one more outcome.
    renormalize: both models are conditioned on the ids. drop: the divergence is summed only over the ids."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds without an answer from any server after which the run saves a checkpoint and stops. A single request is
    given up after a quarter of this time and sent again."""
    prove: Literal["auto", "always", "never"] = "auto"
    """Whether the server's teacher is compared with teacher.model in this process before the first step. auto: only
    if teacher.model is a folder with at most 1 GiB of weights. always: for any size. All other checks are always
    made."""
    prove_every: int = Field(default=0, ge=0)
    """The number of steps, and of reads in evaluations, between two checks that the servers still send the same
    signals as at the start. 0: only at the start, and when a server that sends no hash of its weights returns."""
    accept: list[Literal["chat_template", "eos"]] = Field(default=[])
    """The parts in which the server's tokenizer may differ from the student's: the chat template, the EOS token."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = "auto"
    """The dtype of the weights, in which the layers also compute. auto: the dtype of the saved weights. With url, it
    is the dtype of the output head and of the hidden states that are sent."""
    quantize: Literal["int8", "nf4", "fp8"] | None = None
    """Weights of the teacher's linear layers in 8 bits (int8) or 4 bits (nf4), made while the model is loaded;
    embedding and head keep dtype. fp8: weights and inputs of the products in 8-bit floating point; it needs dtype
    bfloat16 and a GPU of compute capability 8.9 or later. Needs `stillhouse[low-bit]` and a run of one process; for
    a run of several processes, serve the teacher with `stillhouse serve --quantize`. null: not quantized."""
    offload: bool = False
    """Keep the teacher's layers in host memory, except while they run. In one process, all layers are moved to the
    device once per step, for all micro-batches. Under torchrun, FSDP gathers the layers one by one; this needs
    fsdp > 1."""
    parallel: ParallelConfig | None = None
    """A separate layout for the teacher over the same processes, with the keys of parallel. The teacher's hidden
    states are then sent to the student's processes. null: the student's layout."""

    @property
    def signals_from(self) -> str:
        """The key of the source of the signals: `model` only if no other source is set."""
        return next(key for key in reversed(source_kinds()) if getattr(self, key, None) is not None)

    @property
    def source_kind(self) -> SourceKind:
        return source_kinds()[self.signals_from]

    @property
    def urls(self) -> list[str]:
        return text_list(self.url)

    @property
    def source_in_words(self) -> str:
        """A description of the source of the signals, for the objective in words."""
        return self.source_kind.title.format(getattr(self, self.signals_from))

    def is_base_of(self, student: StudentConfig) -> bool:
        """Whether the teacher is the student without its adapter, so that one model in memory serves as both."""
        if student.adapter is None or not self.source_kind.runs_model:
            return False
        same = all(getattr(student, key) == getattr(self, key) for key in ("model", "revision", "attention"))
        same = same and self.quantize == student.quantize
        return same and self.dtype in ("auto", student.dtype) and self.parallel is None

    @model_validator(mode="before")
    @classmethod
    def _has_a_source(cls, content: Any) -> Any:
        kinds = source_kinds()
        sources = [name for name in cls.model_fields if name in kinds and not kinds[name].needs_model]
        if isinstance(content, dict) and all(content.get(name) is None for name in sources):
            *others, last = sources[1:]
            raise MissingKeyError(
                "model",
                f"required, but not given; expected: the model, such as Qwen/Qwen3-8B, or in its place the key "
                f"{', '.join(others)} or {last}",
            )
        return content


class NamedTeacherConfig(TeacherConfig):
    """One of several teachers. It has the keys of `teacher` and more; `student` is a further source of signals."""

    student: Literal["live", "ema"] | None = None
    """The student as its own teacher, in eval mode and without gradients. live: with its present weights; this needs
    a prefix. ema: with an exponential moving average of its weights."""
    ema_decay: float = Field(default=0.999, ge=0, lt=1)
    """With student: ema, the average becomes ema_decay × the average + (1 − ema_decay) × the student's weights after
    each step."""
    prefix: Text | None = Field(default=None, examples=["You know the answer: {answer}. "])
    """Text that only this teacher reads, before the document; `{column}` is filled from the record. In conversations
    it becomes a separate system message."""
    weight: float = Field(default=1.0, gt=0)
    """The weight of the teacher. Its share is the weight divided by the sum of all weights. With teachers.route, the
    weight is a factor of the divergence on the teacher's documents."""
    temperature: float | None = Field(default=None, gt=0)
    """The temperature of this teacher's divergence; null: objective.temperature."""

    @property
    def source_in_words(self) -> str:
        average = f"the student's average (decay {self.ema_decay:g})"
        return {None: super().source_in_words, "live": "the student", "ema": average}[self.student]


class TeachersConfig(Section):
    """Several teachers, each under a name of your choice, with the keys of `teachers.<name>`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, NamedTeacherConfig] = Field(init=False)
    removed: ClassVar[Removed] = {"balance": ("tokens", NO_GAIN)}

    route: Text | None = Field(default=None, examples=["subject"])
    """The column of the data that names each document's teacher. null: every teacher scores every document."""
    sum: Literal["divergences", "distributions"] = "divergences"
    """Without route: the quantities that are summed with the teachers' weights. divergences: the divergences from the
    teachers. distributions: the teachers' probabilities; there is one divergence, from their sum."""

    @property
    def named(self) -> dict[str, NamedTeacherConfig]:
        """The teachers sorted by name, so that all processes have the same order."""
        return dict(sorted(self.__pydantic_extra__.items()))

    @model_validator(mode="before")
    @classmethod
    def _has_names(cls, content: Any) -> Any:
        names = [name for name in content if name not in cls.model_fields] if isinstance(content, dict) else None
        if names == []:
            raise ValueError("names no teacher; expected one or more, such as math: {model: Qwen/Qwen3-8B}")
        for name in names or ():
            if not (isinstance(name, str) and _NAME.fullmatch(name)):
                raise ConfigError(name, "expected a name of letters, digits, - and _, such as math")
        return content

    @model_validator(mode="after")
    def _has_one_average(self) -> Self:
        averaged = [name for name, teacher in self.named.items() if teacher.student == "ema"]
        if len(averaged) > 1:
            raise ConfigError(
                f"{averaged[1]}.student", "got ema a second time; expected one teacher with student: ema"
            )
        return self
