"""Generates samples turn by turn: the model generates a turn, an environment can reply, and the model continues.

`Samples` makes the requests for completions, and takes the completions from an inbox. Without an environment, a
sample is one turn. Replies of an environment are part of the sample, but the student is not trained on them.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.media_files import MediaFile
from stillhouse.rollout.plan import PromptPlan, PromptSeeds
from stillhouse.rollout.records import NOT_GENERATED, Completion, CompletionInbox, GenerationRequest, Sample, Sampling
from stillhouse.rollout.reward import PendingReward, RewardSum
from stillhouse.rollout.turns import CallArguments, Reply, SampleTurns, TurnReplies, done, turn_texts

#: seconds between two calls of `alive` while a method waits for completions, replies or rewards
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass(frozen=True)
class SourceSettings:
    """The settings with which samples are generated for the prompts of one source.

    max_new_tokens: the maximum number of tokens of a sample: all turns of the model and all replies together.
    sampling: how tokens are sampled, or None for the engine's own settings.
    reward, environment: compute the reward and the replies of a sample. If either is set, the prompts must have the
        records of the data.
    calls_from_any_thread: whether a reward or a reply is requested as soon as the model's turn ends, even while the
        engine generates other completions. Otherwise, `Samples.receive` requests it.
    max_turns: the maximum number of turns of the model.
    object_gives_reward: whether the object that `environment` keeps for each sample gives a part of `reward`.
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

    record, source: the record of the prompt, and its `file:line`.
    parts: the model's completions and the environment's replies so far, in their order.
    turns, replies: the number of the model's turns so far, and the replies to them.
    is_requested: whether the model's next turn has been requested and has not arrived.
    reply_calls: by the number of each finished turn of the model (from 0): the turns so far and the future of the
        reply, or None if the sample ends with this turn.
    object_reward: the future of the reward that the sample's object gives, or None if it has not been requested.
    goes_on: whether the model generates another turn; None until the reply to the last turn has been added.
    is_cut: whether the environment's last reply has used up the remaining tokens.
    requested_at, ended_at: the times of the first request and of the last completion (`time.monotonic`).
    """

    number: int
    prompt: int
    settings: SourceSettings
    prompt_ids: np.ndarray
    record: Mapping[str, Any]
    source: str
    media: Sequence[MediaFile] = ()
    parts: list[Completion] = field(default_factory=list)
    turns: int = 0
    replies: list[Reply] = field(default_factory=list)
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
        """Whether a requested completion, a requested reply or the requested reward of the object is missing."""
        if self.is_requested:
            return True
        call, reward = self.reply_calls[self.turns - 1], self.object_reward
        return (call is not None and not call[1].done()) or (reward is not None and not reward.done())

    def texts(self, tokenizer: PreTrainedTokenizerBase, parts: Sequence[Completion]) -> CallArguments:
        """The arguments for a reward or an environment: the prompt, the text of `parts`, the record, its source."""
        completion = tokenizer.decode(Completion.joined(parts).ids_N, skip_special_tokens=True)
        return tokenizer.decode(self.prompt_ids), completion, self.record, self.source

    def ended_turns(self, tokenizer: PreTrainedTokenizerBase, parts: Sequence[Completion]) -> SampleTurns:
        """The turns in `parts` and the replies so far, for the environment. A turn that was cut is omitted."""
        generated = [part for part in parts if part.versions_N[0] != NOT_GENERATED]
        turns = [part.ids_N for part in generated if part.finish == "stop"]
        return SampleTurns(self.number, self.texts(tokenizer, parts), turns, list(self.replies))

    def add_reply(self) -> bool:
        """Add the arrived reply to the present turn, and return whether the model generates another turn."""
        call, environment = self.reply_calls[self.turns - 1], self.settings.environment
        room, reply, self.goes_on = self.settings.max_new_tokens - self.tokens, None, False
        if call is not None:
            assert environment is not None
            reply = environment.reply(*call, room)
        if reply is None or not reply.ids:
            return False
        self.replies.append(reply)
        if room:
            ids_N = np.asarray(reply.ids[:room], dtype=np.int32)
            log_probs_N, versions_N = np.zeros(len(ids_N), np.float32), np.full(len(ids_N), NOT_GENERATED, np.int32)
            self.parts.append(Completion(ids_N, log_probs_N, versions_N, "stop"))
        self.is_cut = len(reply.ids) >= room
        self.goes_on = not self.is_cut
        return self.goes_on

    def sample(self) -> Sample:
        return Sample(
            self.number,
            self.prompt,
            Completion.joined(self.parts, is_cut=self.is_cut),
            object_reward=None if self.object_reward is None else self.object_reward.result(),
            tool_calls=sum(reply.calls for reply in self.replies),
            tool_errors=sum(reply.errors for reply in self.replies),
        )


class Samples:
    """The samples that are being generated. Only the first rank has them.

    sources: the settings of each source of `plan`.
    together: whether samples whose turns are requested together also continue together, when the replies to all these
        turns have arrived. An engine in this job then always gets the same batches.
    alive: called about once per second while a method waits. An error that it raises ends the wait.
    """

    def __init__(
        self,
        prompts: Documents,
        plan: PromptPlan | PromptSeeds,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[SourceSettings],
        *,
        together: bool = False,
        alive: Callable[[], None] = lambda: None,
    ):
        self.prompts, self.plan, self.tokenizer = prompts, plan, tokenizer
        self.sources, self._together, self.alive = sources, together, alive
        self.max_turns = max(source.max_turns for source in sources)
        self._next: list[OpenSample] = []  # the samples whose next turn is not requested yet
        self._requested: dict[int, OpenSample] = {}  # by the number of the request
        #: the samples with a requested turn; the samples of one list continue together
        self._rounds: list[list[OpenSample]] = []
        self._finished: list[Sample] = []
        self._rewards: dict[int, PendingReward] = {}
        self._dropped: list[Future[None]] = []
        self._lock = threading.RLock()
        #: for each finished sample, by its number: the times of its first request and of its last completion
        self.times: dict[int, tuple[float, float]] = {}
        self.inbox = CompletionInbox(is_early=any(source.calls_from_any_thread for source in sources))
        #: the input of `receive`: contents of the inbox, and futures of replies and of objects' rewards that are done
        self._arrivals: SimpleQueue[Any] = SimpleQueue() if self.inbox.is_early else self.inbox.arrivals
        if self.inbox.is_early:
            threading.Thread(target=self._read_early, name="inbox of samples", daemon=True).start()

    def close(self) -> None:
        """End the thread that reads the inbox."""
        self.inbox.arrivals.put(None)

    def settings_of(self, sample: int) -> SourceSettings:
        """The settings of the source to which the prompt of a sample belongs. sample: the sample's number."""
        return self.sources[self.plan.source_of(sample)]

    @property
    def under_way(self) -> set[int]:
        """The numbers of the samples that have been started and are not finished."""
        return {sample.number for sample in chain(self._next, *self._rounds)}

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Start samples. samples: pairs of a sample's number and its prompt's number."""
        has_media, now = self.prompts.has_media, time.monotonic()
        for number, prompt in samples:
            sample = self._opened(number, prompt)
            sample.media, sample.requested_at = self.prompts.media_of(prompt) if has_media else (), now
            self._next.append(sample)

    def take_requests(self) -> list[GenerationRequest]:
        """Return the requests for the completions needed now. An engine must put the completions into the inbox."""
        samples, self._next, requests = self._next, [], list[GenerationRequest]()
        with self._lock:
            for sample in samples:
                number = sample.number * self.max_turns + sample.turns
                requests.append(
                    GenerationRequest(
                        number,
                        np.concatenate([sample.prompt_ids, *(part.ids_N for part in sample.parts)]),
                        self.plan.sample_seed(sample.number, sample.turns),
                        sample.settings.max_new_tokens - sample.tokens,
                        sample.media,
                        sampling=sample.settings.sampling,
                    )
                )
                sample.is_requested, sample.goes_on = True, None
                self._requested[number] = sample
        if samples:
            self._rounds += [samples] if self._together else [[sample] for sample in samples]
        return requests

    def next_requests(self) -> list[GenerationRequest]:
        """Wait until completions are needed, and return their requests, or [] if all samples are finished. Raises the
        errors of `receive` and of `alive`.
        """
        while not self._next and self._rounds:
            if not self.receive(SECONDS_BETWEEN_LOOKS):
                self.alive()
        return self.take_requests()

    def receive(self, seconds: float) -> bool:
        """Process all completions and replies that have arrived, and return whether there were any. If none has
        arrived, wait up to `seconds` seconds for the first.

        Raises ServerError if no server answers in time, UserFunctionError if a reward or a reply is invalid, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        arrivals = self._arrived(seconds)
        completed, errors = self._add_completions(arrivals)
        # all completions were added before the first call, because a call can fail, and a checkpoint needs them all
        for sample in completed:
            self._call_about(sample, sample.parts, sample.turns - 1)
        if errors:
            raise errors[0]
        # in rounds that wait for nothing more, add the replies, and request the rewards of samples that end now
        for sample in chain.from_iterable(self._complete_rounds()):
            if sample.goes_on is None and not sample.add_reply():
                self._request_rewards(sample, sample.parts)
        complete = self._complete_rounds()  # no longer contains rounds that wait for a reward of an object
        self._rounds = [members for members in self._rounds if members not in complete]
        for sample in chain.from_iterable(complete):
            if sample.goes_on:
                self._next.append(sample)
                continue
            if (environment := sample.settings.environment) is not None:
                arguments = sample.texts(self.tokenizer, sample.parts)
                self._dropped.append(environment.end(sample.number, arguments))
                for dropped in [dropped for dropped in self._dropped if dropped.done()]:
                    self._dropped.remove(dropped)
                    dropped.result()  # raises the error of an object that was dropped earlier
            self.times[sample.number] = sample.requested_at, sample.ended_at
            self._finished.append(sample.sample())
        return bool(arrivals)

    def finished(self) -> list[Sample]:
        """Return the samples that have finished since the last call. Rewards can be missing; see `rewarded`."""
        samples, self._finished = self._finished, []
        return samples

    def rewarded(self, sample: Sample) -> Sample:
        """Wait for the reward of a finished sample. Raises UserFunctionError if the reward is invalid."""
        if (reward := self._missing_reward(sample)) is not None:
            while wait(reward.futures, SECONDS_BETWEEN_LOOKS).not_done:
                self.alive()
            sample = reward.added_to(sample)
            del self._rewards[sample.number]
        return sample

    def has_reward(self, sample: Sample) -> bool:
        """Whether `rewarded` would return at once. If a sample from a checkpoint lacks its reward, this method
        requests the reward.
        """
        reward = self._missing_reward(sample)
        return reward is None or reward.is_done

    def with_present_reward(self, sample: Sample) -> Sample:
        """Return the sample, with its reward if already known. Neither waits nor raises errors of the reward."""
        reward = self._rewards.get(sample.number)
        with suppress(Exception):
            return sample if reward is None or not reward.is_done else reward.added_to(sample)
        return sample

    def wait_until_dropped(self) -> None:
        """Wait until the environments have dropped all objects. Raises ValueError if an object's end fails."""
        for source in self.sources:
            if source.reward is not None:
                source.reward.compare_repeated()
        while wait(self._dropped, SECONDS_BETWEEN_LOOKS).not_done:
            self.alive()
        while self._dropped:
            self._dropped.pop(0).result()

    def salvage(self) -> list[Sample]:
        """Return the finished samples, without rewards, for a checkpoint. This method neither waits nor raises the
        errors of samples. It does not process new completions of samples with an environment.
        """
        for arrival in self._arrived(0.0):
            sample = self._requested.get(arrival[0]) if isinstance(arrival, tuple) else None
            if sample is None or sample.settings.environment is not None or isinstance(arrival[1], Exception):
                self._arrivals.put(arrival)  # a later `receive` raises the error or handles the turn
            else:
                self._add_completions([arrival])
        under_way = chain.from_iterable(self._rounds)
        ended = [sample for sample in under_way if not sample.is_requested and sample.settings.environment is None]
        rounds = [[sample for sample in members if sample not in ended] for members in self._rounds]
        self._rounds = [members for members in rounds if members]
        return [*self.finished(), *(sample.sample() for sample in ended)]

    def _opened(self, number: int, prompt: int) -> OpenSample:
        prompts, (start, stop) = self.prompts, self.prompts.offsets[prompt : prompt + 2]
        record = prompts.records[prompt] if prompts.records else {}
        ids = prompts.tokens_N[start:stop]
        return OpenSample(number, prompt, self.settings_of(number), ids, record, prompts.sources[prompt])

    def _arrived(self, seconds: float) -> list[Any]:
        arrivals = []
        with suppress(Empty):
            arrivals.append(self._arrivals.get(timeout=seconds) if seconds else self._arrivals.get_nowait())
            while True:
                arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def _read_early(self) -> None:
        for arrival in iter(self.inbox.arrivals.get, None):
            number, result, _ = arrival
            with suppress(Exception), self._lock:  # `receive` repeats a failed call, and raises the error
                sample = self._requested.get(number)
                if sample is not None and sample.settings.calls_from_any_thread and isinstance(result, Completion):
                    self._call_about(sample, [*sample.parts, result], sample.turns)
            self._arrivals.put(arrival)

    def _add_completions(self, arrivals: Sequence[Any]) -> tuple[list[OpenSample], list[Exception]]:
        completed, errors = list[OpenSample](), list[Exception]()
        for number, result, at in (arrival for arrival in arrivals if isinstance(arrival, tuple)):
            if number not in self._requested:  # this completion has arrived before
                continue
            if isinstance(result, Exception):
                errors.append(result)
                continue
            with self._lock:
                sample = self._requested.pop(number)
                sample.parts.append(result)
                sample.turns, sample.is_requested, sample.ended_at = sample.turns + 1, False, at
            completed.append(sample)
        return completed, errors

    def _call_about(self, sample: OpenSample, parts: Sequence[Completion], turn: int) -> None:
        """Request the reply to a turn or, if the sample ends with this turn, the rewards of the sample. A second call
        for the same turn does nothing.
        """
        with self._lock:
            if turn in sample.reply_calls:
                return
            environment = sample.settings.environment
            is_last = parts[-1].finish == "length" or turn + 1 >= sample.settings.max_turns
            call = None
            if environment is not None and not is_last:
                turns = sample.ended_turns(self.tokenizer, parts)
                if (reply := environment.request(turns)) is not None:
                    call = turns, reply
                    reply.add_done_callback(self._arrivals.put)  # `receive` then stops waiting
            sample.reply_calls[turn] = call
            if call is None:
                self._request_rewards(sample, parts)

    def _complete_rounds(self) -> list[list[OpenSample]]:
        return [members for members in self._rounds if not any(sample.is_waiting for sample in members)]

    def _missing_reward(self, sample: Sample) -> PendingReward | None:
        """The pending reward of a finished sample, requested now if the sample comes from a checkpoint. None if the
        sample has its reward, or if its source has no reward.
        """
        if self.settings_of(sample.number).reward is None or sample.reward is not None:
            return None
        if sample.number not in self._rewards:
            opened = self._opened(sample.number, sample.prompt)
            opened.object_reward = None if sample.object_reward is None else done(sample.object_reward)
            self._request_rewards(opened, [sample.completion])
        return self._rewards[sample.number]

    def _request_rewards(self, sample: OpenSample, parts: Sequence[Completion]) -> None:
        """Request the reward of an ended sample, and the reward of the sample's object, if not requested before."""
        with self._lock:
            if sample.settings.object_gives_reward and sample.object_reward is None:
                assert sample.settings.environment is not None
                sample.object_reward = sample.settings.environment.reward(sample.ended_turns(self.tokenizer, parts))
                sample.object_reward.add_done_callback(self._arrivals.put)
            if sample.settings.reward is not None and sample.number not in self._rewards:
                texts, turns = sample.texts(self.tokenizer, parts), turn_texts(self.tokenizer, parts)
                self._rewards[sample.number] = sample.settings.reward.request(*texts, turns, sample.object_reward)
