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
else:  # the environments that other distributions register have keys here
    _EnvironmentKeys = keys_of_add_ons("stillhouse.environments", "rollout")


class PromptConfig(_EnvironmentKeys):
    """The keys of rollout that a source of data.train may set for its prompts."""

    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the completions that are the student's own (λ of GKD), in whole prompts: all completions of a prompt
    have one origin. The others are the dataset's; cross_entropy in objective.loss counts on them alone."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Completions of each prompt."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Tokens of a completion, its end of sequence included; less than data.max_tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the student's logits when tokens are sampled."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are sampled from the most probable ones with this mass. 1: all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Tokens are sampled from the k most probable ones. 0: all tokens."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens below this share of the largest probability are not sampled. 0: all tokens."""
    stop: list[Text] = Field(default=[])
    """Texts that end a completion, in addition to the end-of-sequence tokens."""
    reward: RewardText | None = Field(default=None, examples=["mypkg.rewards:exact"])
    """package.module:function, called as function(prompt, completion, record) for every completion, and with turns if
    it has an argument of this name. It gives a number, the reward of policy_gradient. Or the address of a server,
    which gets a POST request with {"prompt": …, "completion": …, "record": …, "turns": …} for every completion and
    answers {"reward": number}. Or environment: what the method reward() gives, at the sample's end, of a class in
    environment or tools. Or a weighted sum, such as 0.5*mypkg.rewards:exact + 2*http://127.0.0.1:9000/reward +
    environment, with spaces around the +. null: no reward."""
    environment: FunctionPath | None = Field(default=None, examples=["mypkg.tools:calculator"])
    """package.module:function, called as function(prompt, completion, record) when a turn of the student has ended.
    It gives the text that follows, which is not a target, or None at the end. Or package.module:Class, of which each
    sample has an object, with the methods reset(prompt, record), step(turn) and perhaps reward(). null: one turn."""
    reply: Literal["raw", "user", "tool"] = "raw"
    """How a reply of environment follows a turn. raw: as it is. user, tool: as a message of this role, as the chat
    template writes it, with the generation prompt of the next turn; special tokens in the reply are then ordinary
    text, and the prompts must be conversations."""
    tools: FunctionPaths = Field(default=None, examples=["mypkg.tools:search"])
    """package.module:function that the student may call in its chat template's format, or a list of them. Its type
    hints and its docstring describe it in the prompts. A turn with calls is followed by their replies, which are no
    targets; a turn without calls is the last one. package.module:Class: its public methods are tools, and each sample
    has an object, with a method reset(prompt, record)."""
    tool_tokens: int = Field(default=256, ge=32)
    """Tokens of the text of one tool's reply. A longer reply is cut, and says so at its end."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of the student with an environment or tools."""

    @property
    def tool_paths(self) -> list[str]:
        return text_list(self.tools)

    @property
    def has_turns(self) -> bool:
        """Whether samples may have several turns."""
        return any(getattr(self, name) for name in registered("stillhouse.environments"))

    @property
    def reply_role(self) -> Literal["user", "tool"] | None:
        """The role with which the chat template writes replies of the environment; None if it does not."""
        return None if self.environment is None or self.reply == "raw" else self.reply

    @property
    def is_on_student_alone(self) -> bool:
        """Whether the run trains only on completions of the student."""
        return self.share == 1


def sampling_temperatures(rollouts: Sequence[PromptConfig]) -> list[float]:
    """The different temperatures of several sources of prompts."""
    return list(dict.fromkeys(rollout.temperature for rollout in rollouts))


class SourceRolloutConfig(PromptConfig):
    """Keys of rollout for the prompts of one source. A key that is not set has the value of the section rollout."""

    @model_serializer(mode="wrap")
    def _set_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only the keys that are set, because null is a value of some keys."""
        return {name: value for name, value in write(self).items() if name in self.model_fields_set}


class RolloutConfig(PromptConfig):
    """On-policy training: in each step, the student generates completions of prompts and is trained on them."""

    prompts_per_step: int | None = Field(default=None, ge=1)
    """Prompts of one optimizer step, each with samples_per_prompt completions. null: as many as train.tokens_per_step
    holds if every completion is data.max_tokens long with its prompt."""
    engine: EngineName = "transformers"
    """What generates completions. transformers: the student in the job. The others: servers at url."""
    url: Urls = Field(default=None, examples=["http://127.0.0.1:8001"])
    """The address of a server that generates completions, or a list of addresses."""
    token_variable: VariableName | None = Field(default=None, examples=["WRITER_TOKEN"])
    """The environment variable with the bearer token of the servers at url, as teacher.token_variable. Who has this
    token can load weights on them."""
    reward_tokens: RewardTokens | None = Field(default=None, examples=[{"http://10.0.0.9:9000": "REWARD_TOKEN"}])
    """The environment variables with the bearer tokens of servers in reward, each by http://host:port of its server.
    The others get no token. null: none of them."""
    weights: PathText | None = None
    """A folder that this job and the servers at url share, for the student's weights. Each run has a folder of its
    own in it. null: the folder weights in out."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds without an answer of any server of url, or of a server in reward, after which the run saves a
    checkpoint and stops. With several servers of url, one that answers nothing for half of the time that is left
    loses its requests to another one."""
    schedule: Literal["sync", "one_step_off", "two_step_off", "async"] = "sync"
    """When completions are generated. sync: in their own step. one_step_off, two_step_off: one or two steps ahead,
    while earlier steps are trained. async: ahead, too, and with new weights in the middle of completions; a step
    trains on those that are finished first, as far as max_staleness allows."""
    max_staleness: int = Field(default=2, ge=0)
    """How many optimizer steps the weights that generated a token may be behind those that it trains. It limits all
    schedules: 0 makes each of them the same as sync."""
    correction: Literal["none", "truncated", "masked"] = "truncated"
    """The weight of policy_gradient and sampled_kl at a token, by the ratio of its probabilities in training and at
    its sampling. truncated: the ratio, at most limit (TIS). masked: the ratio, and 0 outside of 1/limit to limit
    (IcePop). none: 1. Divergences need none: they are exact whichever token was sampled."""
    limit: float = Field(default=2.0, gt=1)
    """The limit of correction."""
    advantage: Literal["normalized", "centered"] = "normalized"
    """The advantage of a completion among those of its prompt. normalized: reward minus mean, divided by the standard
    deviation (GRPO). centered: reward minus mean."""
    deviation: Literal["population", "sample"] = "population"
    """The standard deviation of advantage=normalized, of n completions: population divides the sum of squares by n,
    sample by n - 1, as TRL and verl do."""
    workers: int = Field(default=0, ge=0, le=1024)
    """Processes on rank 0's host in which reward and environment run, many completions at once. 0: in the process
    of rank 0, one completion at a time. The run's results are the same."""
    worker_timeout: float = Field(default=60.0, gt=0)
    """Seconds of one call in a worker. A worker that takes longer, ends or runs out of memory is replaced, and the
    call is repeated once; then the run ends with an error."""
    worker_memory: float | None = Field(default=None, gt=0)
    """GiB that a worker may allocate after it has imported the functions (on Linux). null: no limit."""
    writer: Literal["student", "teacher"] = "student"
    """What generates the completions. teacher: the teacher, as for sequence-level distillation (SeqKD): teacher.model
    in this process, or the model that the servers at url have. cross_entropy in objective.loss then counts on
    them."""
    truncated: Literal["keep", "mask"] = "keep"
    """Completions without an end within max_new_tokens. mask: none of their tokens is a target."""
    discount: float = Field(default=0.0, ge=0, le=1)
    """With policy_gradient(teacher_kl=…): a token's advantage is the sum of the teacher's log-ratios from this token
    on, each multiplied by this number for every token in between (MiniLLM). 0: its own alone."""
    samples: Annotated[int, Field(ge=0)] | Literal["all"] = 4
    """The most completions of a step in samples.jsonl: all completions of some prompts, or the first ones of one
    prompt if it has more. all: all completions of the step."""
    position_decay: float = Field(default=1.0, gt=0, le=1)
    """The weight of the n-th token of a completion is this number to the power n. 1: all equal."""

    @property
    def urls(self) -> list[str]:
        return text_list(self.url)

    def for_source(self, source: SourceRolloutConfig | None) -> "RolloutConfig":
        """The section with the keys that a source of prompts sets."""
        if source is None:
            return self
        return self.model_copy(update={name: getattr(source, name) for name in source.model_fields_set})
