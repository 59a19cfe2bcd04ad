"""A sample that is being generated: its turns so far, and what its environment has replied."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.media_files import MediaFile
from stillhouse.rollout.records import Completion, Sample, Sampling
from stillhouse.rollout.reward import RewardSum
from stillhouse.rollout.turns import CallArguments, SampleTurns, TurnReplies

#: the version of a token that no model generated
NOT_GENERATED = -1


@dataclass(frozen=True)
class SourceSettings:
    """How samples of the prompts of one source are generated.

    max_new_tokens: the maximum number of tokens of a sample: all turns of the model and all replies together.
    sampling: how tokens are sampled; None: as the engine does without it.
    reward: see `reward.py`. environment: replies to the model's turns. If one is set, the prompts need
        the records of the data.
    object_gives_reward: whether the sample's object in `environment` gives a part of `reward`.
    calls_from_any_thread: whether a reward or a reply is requested as soon as the model's turn has ended, also while
        the engine generates others. Otherwise, `Samples.receive` requests it.
    max_turns: the maximum number of turns of the model.
    """

    max_new_tokens: int
    sampling: Sampling | None = None
    reward: RewardSum | None = None
    environment: TurnReplies | None = None
    calls_from_any_thread: bool = False
    max_turns: int = 1
    object_gives_reward: bool = False


@dataclass(eq=False)
class OpenSample:
    """A sample that is being generated.

    record, source: of the prompt, and its `file:line`.
    parts: the model's completions and the environment's replies so far, in their order.
    turns: the number of the model's turns so far.
    replies: the replies to these turns so far.
    is_requested: whether the completion of the present turn has not arrived.
    reply_calls: for each of the model's turns that has ended, the turns so far and the reply that was requested;
        None: the sample ends with this turn.
    object_reward: the reward that its object gives, as soon as it is requested.
    goes_on: whether the model generates another turn; None until the reply to the present turn has arrived.
    is_cut: whether the environment's last reply has used up the remaining tokens.
    requested_at, ended_at: the times of its first request and of its last completion (`time.monotonic`).
    """

    number: int
    prompt: int
    settings: SourceSettings
    prompt_ids: np.ndarray
    record: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    media: Sequence[MediaFile] = ()
    parts: list[Completion] = field(default_factory=list)
    turns: int = 0
    replies: list[Any] = field(default_factory=list)
    is_requested: bool = False
    reply_calls: dict[int, tuple[SampleTurns, Future[Any]] | None] = field(default_factory=dict)
    object_reward: Future[float] | None = None
    goes_on: bool | None = None
    is_cut: bool = False
    requested_at: float = 0.0
    ended_at: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(part.ids_N) for part in self.parts)

    @property
    def is_waiting(self) -> bool:
        """Whether its completion is missing, or something that the environment computes."""
        if self.is_requested:
            return True
        call = self.reply_calls[self.turns - 1]
        futures = [None if call is None else call[1], self.object_reward]
        return any(future is not None and not future.done() for future in futures)

    def texts(self, tokenizer: PreTrainedTokenizerBase, parts: Sequence[Completion]) -> CallArguments:
        """The arguments of a reward or an environment about these parts of the sample."""
        ids_N = np.concatenate([part.ids_N for part in parts])
        completion = tokenizer.decode(ids_N, skip_special_tokens=True)
        return tokenizer.decode(self.prompt_ids), completion, self.record, self.source

    def ended_turns(self, tokenizer: PreTrainedTokenizerBase, parts: Sequence[Completion]) -> SampleTurns:
        """What the environment gets: the turns of the model, without one that was cut."""
        generated = [part for part in parts if part.versions_N[0] != NOT_GENERATED]
        turns = [part.ids_N for part in generated if part.finish == "stop"]
        return SampleTurns(self.number, self.texts(tokenizer, parts), turns, list(self.replies))

    def add_reply(self) -> bool:
        """Add the reply to the present turn, which has arrived; returns whether the model generates another turn."""
        call, environment = self.reply_calls[self.turns - 1], self.settings.environment
        self.goes_on = False
        if call is None:
            return False
        assert environment is not None
        reply = environment.reply(*call)
        room = self.settings.max_new_tokens - self.tokens
        ids = environment.ids(reply, room)
        if not ids:
            return False
        self.replies.append(reply)
        if room:
            ids_N = np.asarray(ids[:room], dtype=np.int32)
            log_probs_N, versions_N = np.zeros(len(ids_N), np.float32), np.full(len(ids_N), NOT_GENERATED, np.int32)
            self.parts.append(Completion(ids_N, log_probs_N, versions_N, "stop"))
        self.is_cut = len(ids) >= room
        self.goes_on = not self.is_cut
        return self.goes_on

    def sample(self) -> Sample:
        """The finished sample."""
        versions_N = np.concatenate([part.versions_N for part in self.parts])
        completion = Completion(
            np.concatenate([part.ids_N for part in self.parts]),
            np.concatenate([part.log_probs_N for part in self.parts]),
            versions_N,
            "length" if self.is_cut else self.parts[-1].finish,
        )
        environment = self.settings.environment
        calls, errors = (0, 0) if environment is None else environment.call_counts(self.replies)
        return Sample(
            self.number,
            self.prompt,
            completion,
            versions_N != NOT_GENERATED,
            object_reward=None if self.object_reward is None else self.object_reward.result(),
            tool_calls=calls,
            tool_errors=errors,
        )
