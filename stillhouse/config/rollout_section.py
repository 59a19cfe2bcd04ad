"""On-policy training: who generates the completions, how tokens are sampled, and how old the weights may be."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from stillhouse.config.reward_sum import RewardText
from stillhouse.config.section import (
    FunctionPath,
    FunctionPaths,
    PathText,
    Section,
    Text,
    Urls,
    keys_of_add_ons,
    text_list,
)
from stillhouse.config.servers import EngineName, RewardTokens, VariableName
from stillhouse.registry import registered

if TYPE_CHECKING:
    _EnvironmentKeys = Section
else:  # other distributions can register environments; their keys are added to this section
    _EnvironmentKeys = keys_of_add_ons("stillhouse.environments", "rollout")


class PromptConfig(_EnvironmentKeys):
    """The keys of rollout that a source of data.train can set for its prompts."""

    share: float = Field(default=1.0, gt=0, le=1)
    """The share of completions that are generated (λ of GKD); all others are from the dataset. All completions of a
    prompt have one origin. With writer=student, cross_entropy applies only to completions of the dataset."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """The number of completions of each prompt."""
    max_new_tokens: int = Field(default=512, ge=1)
    """The maximum number of tokens of a completion, including its end of sequence; less than data.max_tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the student's logits when tokens are sampled."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are sampled from the most probable tokens that together have this mass. 1: from all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Tokens are sampled from the k most probable tokens. 0: from all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """A token is sampled only if its probability is at least this share of the largest one. 0: no minimum."""
    stop: list[Text] = Field(default=[])
    """Texts that end a completion, in addition to the end-of-sequence tokens."""
    reward: RewardText | None = Field(default=None, examples=["mypkg.rewards:exact"])
    """The reward of every completion, for policy_gradient. package.module:function is called as function(prompt,
    completion, record), also with turns if it has an argument of this name, and returns a number. The address of a
    server: the server gets POST requests with {"prompt": …, "completion": …, "record": …, "turns": …} and answers
    {"reward": number}. environment: the result of the method reward() of a class in environment or tools at the end
    of the sample. A weighted sum of these: such as 0.5*mypkg.rewards:exact + 2*http://127.0.0.1:9000/reward +
    environment, with spaces around each +. null: no reward."""
    environment: FunctionPath | None = Field(default=None, examples=["mypkg.tools:calculator"])
    """The replies to turns of the student. package.module:function is called as function(prompt, completion, record)
    after each turn. It returns a text, which is not a target, or None to end the sample. package.module:Class has the
    methods reset(prompt, record), step(turn) and perhaps reward(); each sample has an object. null: one turn."""
    reply: Literal["raw", "user", "tool"] = "raw"
    """How a reply of environment is added after a turn. raw: without a change. user, tool: as a message of this role,
    which the chat template writes with the generation prompt of the next turn. The names of special tokens in the
    reply are then ordinary text, and the prompts must be conversations."""
    tools: FunctionPaths = Field(default=None, examples=["mypkg.tools:search"])
    """A package.module:function that the student can call in its chat template's format, or a list of functions. Type
    hints and docstrings describe them in the prompts. The replies follow a turn with calls; their tokens are not
    targets. A turn without calls is the last turn. package.module:Class has a method reset(prompt, record); its other
    public methods except close and reward are tools. Each sample has its own object."""
    tool_tokens: int = Field(default=256, ge=32)
    """The most tokens of the text of one tool's reply. A longer reply is cut, and a note is added at its end."""
    max_turns: int = Field(default=8, ge=1)
    """The maximum number of turns of the student with an environment or tools."""

    @property
    def tool_paths(self) -> list[str]:
        return text_list(self.tools)

    @property
    def has_turns(self) -> bool:
        """Whether samples can have several turns."""
        return any(getattr(self, name) for name in registered("stillhouse.environments"))

    @property
    def reply_role(self) -> Literal["user", "tool"] | None:
        """The role with which the chat template writes the environment's replies; None if it does not write them."""
        return None if self.environment is None or self.reply == "raw" else self.reply

    @property
    def is_on_student_alone(self) -> bool:
        """Whether all completions are generated, and none is from the dataset."""
        return self.share == 1


def sampling_temperatures(rollouts: Sequence[PromptConfig]) -> list[float]:
    """The temperatures of several sources of prompts, each value once."""
    return list(dict.fromkeys(rollout.temperature for rollout in rollouts))


class SourceRolloutConfig(PromptConfig):
    """Keys of rollout for the prompts of one source. A key that is not set has its value from the section rollout."""

    @model_serializer(mode="wrap")
    def _set_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that are set, because each key that is read again replaces that of section rollout."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class RolloutConfig(PromptConfig):
    """On-policy training: in each step, the student generates completions of prompts and is trained on them."""

    prompts_per_step: int | None = Field(default=None, ge=1)
    """The number of prompts in one optimizer step, each with samples_per_prompt completions. null: the number that
    fits into train.tokens_per_step if every prompt with its completion has data.max_tokens tokens."""
    engine: EngineName = "transformers"
    """The generator of completions. transformers: the student in the job. Other values: servers at url."""
    url: Urls = Field(default=None, examples=["http://127.0.0.1:8001"])
    """The address of a server that generates completions, or a list of addresses."""
    token_variable: VariableName | None = Field(default=None, examples=["WRITER_TOKEN"])
    """The environment variable with the bearer token of the servers at url, as for teacher.token_variable. Anyone who
    has this token can load weights into these servers."""
    reward_tokens: RewardTokens | None = Field(default=None, examples=[{"http://10.0.0.9:9000": "REWARD_TOKEN"}])
    """The environment variables with the bearer tokens of servers in reward, by the http://host:port of the server.
    All other servers get no token. null: no server gets a token."""
    weights: PathText | None = None
    """A folder that this job and the servers at url share, for the student's weights. Each run creates its own folder
    in this folder. null: the folder weights in out."""
    timeout: float = Field(default=600.0, gt=0)
    """The run saves a checkpoint and stops after this many seconds without an answer from any server at url, or
    without an answer from a server in reward. If one of several servers at url does not answer for half of the
    remaining time, its requests go to another server."""
    schedule: Literal["sync", "one_step_off", "two_step_off", "async"] = "sync"
    """When completions are generated. sync: in the step that trains on them. one_step_off, two_step_off: one or two
    steps ahead, during the training of earlier steps. async: also ahead, and new weights are used in the middle of
    completions; a step trains on the completions that finish first, as far as max_staleness allows."""
    max_staleness: int = Field(default=2, ge=0)
    """The most optimizer steps between the weights that generated a token and the weights that are trained on it. It
    limits all schedules: with 0, each schedule is the same as sync."""
    correction: Literal["none", "truncated", "masked"] = "truncated"
    """The weight of policy_gradient and sampled_kl at a token, from the ratio of the token's probabilities in
    training and in sampling. truncated: the ratio, at most limit (TIS). masked: the ratio, but 0 if it is outside of
    1/limit to limit (IcePop). none: 1. Divergences need no correction: they are exact for any sampled token."""
    limit: float = Field(default=2.0, gt=1)
    """The limit of the ratio for correction."""
    advantage: Literal["normalized", "centered"] = "normalized"
    """The advantage of a completion among the completions of its prompt. normalized: reward minus mean, divided by
    the standard deviation (GRPO). centered: reward minus mean."""
    deviation: Literal["population", "sample"] = "population"
    """The standard deviation for advantage=normalized, over n completions. population: the sum of squares is divided
    by n. sample: it is divided by n - 1, as in TRL and verl."""
    workers: int = Field(default=0, ge=0, le=1024)
    """The number of processes on rank 0's host that run reward and environment for many completions at once. 0: they
    run in the process of rank 0, for one completion at a time. The results are the same. No worker, and no program
    that a function starts, outlives the run, except programs in a session of their own (setsid). Without workers, a
    function that calls os._exit(0) ends the run with code 0 and without a model, and one that never releases Python's
    lock, such as 9**9**9, ends only by SIGKILL."""
    worker_timeout: float = Field(default=60.0, gt=0)
    """The most seconds of one call in a worker. A worker that takes longer, ends or runs out of memory is replaced,
    and the call is repeated once. If it fails again, the run ends with an error."""
    worker_memory: float | None = Field(default=None, gt=0)
    """The most GiB that a worker can allocate after it has imported the functions (on Linux). null: no limit."""
    writer: Literal["student", "teacher"] = "student"
    """The model that generates the completions. teacher: for sequence-level distillation (SeqKD), teacher.model in
    this process, or the model of the servers at url; cross_entropy then applies to these completions."""
    truncated: Literal["keep", "mask"] = "keep"
    """The treatment of completions that do not end within max_new_tokens. mask: their tokens are not targets."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """With policy_gradient(teacher_kl=…): a token's advantage is the sum of the teacher's log-ratios from this token
    on. The log-ratio k tokens later is multiplied by this number to the power k (MiniLLM). 0: only the
    log-ratio of the token itself."""
    samples: Annotated[int, Field(ge=0)] | Literal["all"] = 4
    """The most completions of a step in samples.jsonl: all completions of some prompts, or the first completions of
    one prompt if it has more than this number. all: all completions of the step."""
    position_decay: float = Field(default=1.0, gt=0, le=1)
    """The weight of the n-th token of a completion is this number to the power n. 1: all weights are equal."""

    @property
    def urls(self) -> list[str]:
        return text_list(self.url)

    def for_source(self, source: SourceRolloutConfig | None) -> "RolloutConfig":
        """Return this section with the values that a source of prompts sets in place of its own values."""
        if source is None:
            return self
        return self.model_copy(update={name: getattr(source, name) for name in source.model_fields_set})
