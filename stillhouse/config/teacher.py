"""The model that is imitated, and where its signals come from."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stillhouse.config.errors import ConfigError, MissingKeyError
from stillhouse.config.model import ModelConfig
from stillhouse.config.parallel import ParallelConfig
from stillhouse.config.section import PathText, Text
from stillhouse.config.urls import require_urls

#: the folder of a cache with its teacher's configuration, tokenizer and output head
CACHED = "teacher"


class TeacherConfig(ModelConfig):
    """The model that is imitated; it is frozen. It may be absent (null) if the loss has no divergence.

    One of `model` (it runs in this job), `cache` and `url` says where its signals come from.
    """

    #: the keys of which one says where the signals come from
    sources: ClassVar[tuple[str, ...]] = ("model", "cache", "url")

    model: PathText | None = Field(
        default=None,
        description="Hugging Face id, or the path of a folder with config.json, safetensors and tokenizer. With url,"
        " it is needed for hidden states from vLLM or SGLang: the tokenizer and the output head are read from it.",
        examples=["Qwen/Qwen3-8B"],
    )
    cache: PathText | None = Field(
        default=None,
        description="A folder that `stillhouse cache` has written. The teacher's signals are read from it, and no"
        " teacher runs; teacher.model is then left out.",
    )
    url: Text | list[Text] | None = Field(
        default=None,
        description="The address of a server of the teacher (`stillhouse serve`, vLLM or SGLang), or a list of"
        " addresses. The environment variable STILLHOUSE_TOKEN, if it is set, is sent as the bearer token.",
        examples=["http://10.0.0.7:8000"],
    )
    api: Literal["auto", "stillhouse", "vllm", "sglang"] = Field(
        default="auto", description="What the server at url speaks. auto: the server is asked."
    )
    signal: Literal["hidden", "top_k", "chosen", "sampled"] = Field(
        default="hidden",
        description="What the server is asked for. hidden: hidden states, which give the exact distribution at every"
        " temperature. top_k: the likeliest ids. chosen: the ids that are likeliest for the student. sampled: draws"
        " from the teacher.",
    )
    cross_tokenizer: Literal["gold", "uld"] | None = Field(
        default=None,
        description="For a teacher with another tokenizer: an approximation of its distribution over the student's"
        " tokens. gold: merged probabilities of the spans of text on which both tokenizers agree. uld: the distance"
        " of the sorted probabilities; objective.loss then has uld and no divergence. null: the teacher must have the"
        " student's tokenizer, and nothing is approximated.",
    )
    top_k: int = Field(
        default=64,
        ge=1,
        description="Ids per token of top_k and chosen, and draws per token of sampled; with cross_tokenizer, the"
        " teacher's likeliest ids per token.",
    )
    tail: Literal["bucket", "renormalize", "drop"] = Field(
        default="bucket",
        description="How the mass outside of the ids of top_k and chosen counts. bucket: as one more outcome."
        " renormalize: not at all, both sides are conditioned on the ids. drop: the sum over the ids only.",
    )
    timeout: float = Field(
        default=600.0,
        gt=0,
        description="Seconds without an answer of any server, after which the run saves a checkpoint and stops. A"
        " single request is given up after a quarter of them, and sent again.",
    )
    prove: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether the server's teacher is compared with the same model in this process before the first"
        " step. auto: if teacher.model is a folder with at most 1 GiB of weights. always: teacher.model is loaded"
        " whatever its size. The other checks of a server are always made.",
    )
    prove_every: int = Field(
        default=0,
        ge=0,
        description="Steps, and parts of evaluations, between two checks that the servers still give the signals that"
        " they gave at the start. 0: only at the start, and when a server of vLLM or SGLang comes back.",
    )
    accept: list[Literal["chat_template", "eos"]] = Field(
        default=[],
        description="Differences between the server's tokenizer and the student's that are accepted: another chat"
        " template, another end-of-sequence token.",
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        default="auto",
        description="The dtype of the weights; the layers compute in it, too. auto: the dtype of the saved weights."
        " With url: the dtype of the output head and of hidden states on the wire.",
    )
    quantize: Literal["int8", "nf4"] | None = Field(
        default=None,
        description="Weights of the teacher's linear layers in 8 bits (int8) or 4 bits (nf4), made while the model is"
        " loaded; embedding and head keep dtype. Needs `stillhouse[low-bit]` and a run of one process; for several,"
        " serve the teacher with `stillhouse serve --quantize`. null: not quantized.",
    )
    offload: bool = Field(
        default=False,
        description="Keep the teacher's layers in host memory, except while they run: in one process all of them are"
        " moved to the device once per step, for all of its micro-batches; under torchrun, FSDP gathers them layer"
        " by layer, and needs fsdp > 1.",
    )
    parallel: ParallelConfig | None = Field(
        default=None,
        description="A layout of the teacher's own, over the same processes, with the keys of parallel. The teacher's"
        " hidden states are then sent to the student's processes. null: the student's layout.",
    )

    @property
    def urls(self) -> list[str]:
        if self.url is None:
            return []
        return [self.url] if isinstance(self.url, str) else self.url

    @model_validator(mode="before")
    @classmethod
    def _has_a_source(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        named = [name for name in cls.sources if given.get(name) is not None]
        others = [f"teacher.{name}" for name in cls.sources[1:]]
        if not named:
            raise MissingKeyError(
                "teacher.model",
                f"required, but not given; expected: the model, {', '.join(others[:-1])} or {others[-1]}, such as"
                " Qwen/Qwen3-8B",
            )
        for name in ("cache", "student"):
            if name in named and len(named) > 1:
                without = " ".join(f"teacher.{each}=null" for each in named if each != name)
                raise ConfigError(
                    f"teacher.{name}", f"expected one source of signals, got {' and '.join(named)}: add {without}"
                )
        return given

    @model_validator(mode="after")
    def _fits_its_source(self) -> "TeacherConfig":
        if self.url is not None:
            require_urls("teacher.url", self.urls)
        source = "cache" if self.cache is not None else "url"
        if self.parallel is not None and getattr(self, source) is not None:
            raise ConfigError("teacher.parallel", f"expected null with teacher.{source}: no teacher runs in this job")
        if self.url is not None and self.trust_remote_code:
            raise ConfigError("teacher.trust_remote_code", "expected false with teacher.url")
        if self.url is not None and self.dtype == "float64":
            raise ConfigError("teacher.dtype", "got float64, expected float32, bfloat16 or float16 with teacher.url")
        if self.prove == "always" and self.model is None:
            raise ConfigError("teacher.prove", "got always, which needs teacher.model: the weights to compare with")
        if self.url is None:
            for key in ("api", "signal", "top_k", "timeout", "prove", "prove_every", "accept"):
                if key == "top_k" and self.cross_tokenizer is not None:
                    continue
                if getattr(self, key) != type(self).model_fields[key].default:
                    also = " or teacher.cross_tokenizer" if key == "top_k" else ""
                    raise ConfigError(f"teacher.{key}", f"has an effect only with teacher.url{also}")
        return self

    @model_validator(mode="after")
    def _runs_here_as_asked(self) -> "TeacherConfig":
        for key in ("quantize", "offload"):
            if getattr(self, key) and (self.url is not None or self.cache is not None):
                source = "cache" if self.cache is not None else "url"
                raise ConfigError(
                    f"teacher.{key}", f"has no effect with teacher.{source}: no teacher runs in this job"
                )
        if self.quantize is not None and self.parallel is not None:
            raise ConfigError("teacher.quantize", f"got {self.quantize} with teacher.parallel: expected null")
        if self.quantize is not None and self.offload:
            raise ConfigError("teacher.offload", f"got true with teacher.quantize={self.quantize}: expected false")
        if self.offload and self.cross_tokenizer is not None:
            raise ConfigError("teacher.offload", "got true with teacher.cross_tokenizer: expected false")
        return self

    @model_validator(mode="after")
    def _fits_another_tokenizer(self) -> "TeacherConfig":
        method, key = self.cross_tokenizer, "teacher.cross_tokenizer"
        if method is None:
            return self
        if self.cache is not None:
            raise ConfigError(key, f"got {method} with teacher.cache, whose ids are the student's: expected null")
        if self.url is not None:
            raise ConfigError(key, f"got {method} with teacher.url: expected teacher.model, a teacher in this job")
        if self.parallel is not None:
            raise ConfigError(
                "teacher.parallel",
                f"expected null with {key}={method}: every process that needs signals holds the whole teacher",
            )
        if method == "uld" and self.tail != "bucket":
            raise ConfigError("teacher.tail", f"got {self.tail}, which has no effect with {key}=uld: expected bucket")
        return self
