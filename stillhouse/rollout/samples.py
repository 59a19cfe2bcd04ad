"""Generates samples turn by turn: the model generates, an environment may answer, and the model goes on.

Without an environment, a sample is one turn. Replies of an environment are part of the sample, but not targets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.rollout.engines import RolloutEngine
from stillhouse.rollout.records import Completion, GenerationRequest, Sample
from stillhouse.rollout.reward import Reward
from stillhouse.rollout.source_settings import SourceSettings
from stillhouse.rollout.turns import SampleTurns, done, turn_texts
from stillhouse.user_code.functions import Turn

#: the version of a token that no model generated
NOT_GENERATED = -1
#: seconds between two calls of `alive` while a sample waits for its reward
SECONDS_BETWEEN_LOOKS = 1.0


class SamplePlan(Protocol):
    """The part of a `PromptPlan` that generation needs."""

    def group_of(self, sample: int) -> int: ...
    def source_of(self, group: int) -> int: ...
    def sample_seed(self, sample: int, turn: int) -> int: ...


@dataclass
class _Open:
    """A sample that is being generated.

    parts: the model's completions and the environment's replies so far, in their order.
    turns: the number of the model's turns so far.
    replies: the replies to these turns so far.
    object_reward: the reward that its object gives, as soon as it is requested.
    goes_on: whether the model generates another turn; None until the reply to the present turn has arrived.
    is_cut: whether the environment's last reply has used up the remaining tokens.
    reply_futures: for each of the model's turns that has ended, the reply that was requested; None: the sample ends
        with this turn.
    requested_at: the time of the first request, in seconds of `time.monotonic`.
    ended_at: for each turn, the time of its end.
    in_job: whether the engine has generated the present turn before `generate` returned. Such samples of one request
        go on together, so that an engine in this job always gets the same batches.
    """

    number: int
    prompt: int
    parts: list[Completion] = field(default_factory=list)
    turns: int = 0
    replies: list[Any] = field(default_factory=list)
    object_reward: Future[float] | None = None
    goes_on: bool | None = None
    is_cut: bool = False
    reply_futures: dict[int, Future[Any] | None] = field(default_factory=dict)
    requested_at: float = 0.0
    ended_at: dict[int, float] = field(default_factory=dict)
    in_job: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(part.ids_N) for part in self.parts)

    @property
    def reply(self) -> Future[Any] | None:
        """The environment's reply to the last turn that has ended."""
        return self.reply_futures[self.turns - 1]

    @property
    def missing(self) -> list[Future[Any]]:
        """What the environment still has to compute."""
        return [future for future in (self.reply, self.object_reward) if future is not None and not future.done()]


class SampleGenerator:
    """Requests samples from an engine, and returns the finished ones.

    sources: the settings of each source of `plan`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Documents,
        plan: SamplePlan,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[SourceSettings],
    ):
        self.engine, self.prompts, self.plan, self.tokenizer = engine, prompts, plan, tokenizer
        self.sources = list(sources)
        self._max_turns = max(source.max_turns for source in sources)
        self._futures: dict[Future[Completion], _Open] = {}
        self._rounds: list[list[_Open]] = []  # samples that go on together after the replies to them
        self._rewards: dict[int, Future[Reward]] = {}
        self._dropped: list[Future[None]] = []
        self._lock = threading.RLock()
        #: for each finished sample, by its number: the times of its first request and of its last completion
        self.times: dict[int, tuple[float, float]] = {}

    def settings_of(self, sample: int) -> SourceSettings:
        """The settings of the source to which the prompt of a sample belongs. sample: the sample's number."""
        return self.sources[self.plan.source_of(self.plan.group_of(sample))]

    @property
    def under_way(self) -> list[int]:
        """The numbers of the samples that are not finished."""
        return [sample.number for sample in self._open]

    @property
    def is_open_in_job(self) -> bool:
        """Whether an engine in this job has samples that wait for replies of the environment."""
        return any(sample.in_job for sample in self._open)

    @property
    def has_turns(self) -> bool:
        """Whether samples of some source may have several turns."""
        return self._max_turns > 1

    @property
    def _open(self) -> list[_Open]:
        return [*self._futures.values(), *(sample for together in self._rounds for sample in together)]

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Request samples. samples: pairs of a sample's number and its prompt's number."""
        now = time.monotonic()
        self._ask([_Open(number, prompt, requested_at=now) for number, prompt in samples])

    def finished(self, seconds: float) -> list[Sample]:
        """Return the samples finished since the last call. If there is none, wait up to `seconds` seconds for one.

        Their rewards may still be computed, see `rewarded`.

        Raises ServerError if no server answers in time, UserFunctionError if a reward or a reply is invalid, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        samples: list[Sample] = []
        while (self._futures or self._rounds) and not samples:
            waiting: list[Future[Any]] = [*self._futures, *self._missing]
            done, missing = wait(waiting, seconds, FIRST_COMPLETED)
            if missing and not done:
                break
            # in the order of the requests, so that an engine in this process always gets the same batches
            ended = [(sample, future) for future, sample in self._futures.items() if future in done]
            for sample, future in ended:
                self._call_about(sample, sample.turns, future.result())
            completed = [self._completed(future) for _, future in ended]
            together = [sample for sample in completed if sample.in_job]
            self._rounds += [together] if together else []
            self._rounds += [[sample] for sample in completed if not sample.in_job]
            samples = self._end_rounds()
        return samples

    def rewarded(self, sample: Sample, alive: Callable[[], None]) -> Sample:
        """Wait for the reward of a finished sample. alive: called about once per second while waiting.

        Raises UserFunctionError if the reward is invalid.
        """
        if self.settings_of(sample.number).reward is None or sample.reward is not None:
            return sample
        future = self._reward_of(sample)
        while not wait([future], SECONDS_BETWEEN_LOOKS).done:
            alive()
        rewarded = _with_reward(sample, future.result())
        self._rewards.pop(sample.number, None)
        return rewarded

    def has_reward(self, sample: Sample) -> bool:
        """Whether `rewarded` needs not wait. A sample of a checkpoint may have no reward; it is then requested."""
        if self.settings_of(sample.number).reward is None or sample.reward is not None:
            return True
        return self._reward_of(sample).done()

    def with_present_reward(self, sample: Sample) -> Sample:
        """The sample with its reward, if it is computed already. Does not wait, and raises no error of the reward."""
        future = self._rewards.get(sample.number)
        if future is None or not future.done() or future.exception() is not None:
            return sample
        return _with_reward(sample, future.result())

    def wait_until_dropped(self, alive: Callable[[], None]) -> None:
        """Wait until the environment has dropped its objects of all samples that have ended. alive: see `rewarded`.

        Raises ValueError if the end of an object fails.
        """
        while wait(self._dropped, SECONDS_BETWEEN_LOOKS).not_done:
            alive()
        while self._dropped:
            self._dropped.pop(0).result()

    def salvage(self) -> list[Sample]:
        """Return the finished samples, for a checkpoint. This does not wait, and does not raise errors of samples.

        They have no rewards yet. A sample remains under way if there is an environment.
        """
        samples: list[Sample] = []
        for future, sample in [*self._futures.items()]:
            is_done = future.done() and not future.cancelled() and future.exception() is None
            if is_done and self.settings_of(sample.number).environment is None:
                samples.append(self._sample(self._completed(future)))
        return samples

    @property
    def _missing(self) -> list[Future[Any]]:
        return [future for together in self._rounds for sample in together for future in sample.missing]

    def _completed(self, future: Future[Completion]) -> _Open:
        """Add the completion of a future that is done to its sample. Raises the future's error."""
        with self._lock:
            sample = self._futures.pop(future)
            sample.ended_at.setdefault(sample.turns, time.monotonic())  # the callback may run after `wait`
            sample.parts.append(future.result())
            sample.turns, sample.goes_on = sample.turns + 1, None
        return sample

    def _call_about(self, sample: _Open, turn: int, completion: Completion) -> None:
        """Request the reply to a turn, or the rewards of a sample that ends with it; once for a turn."""
        with self._lock:
            if turn in sample.reply_futures or turn < sample.turns:  # a callback may run after `salvage`
                return
            parts, settings, reply = [*sample.parts, completion], self.settings_of(sample.number), None
            is_last = completion.finish == "length" or turn + 1 >= settings.max_turns
            if settings.environment is not None and not is_last:
                reply = settings.environment.request(self._ended_turns(sample, parts))
            sample.reply_futures[turn] = reply
            if reply is None:
                self._request_rewards(sample, parts)

    def _end_rounds(self) -> list[Sample]:
        """Request the next turns of all rounds whose replies have arrived, and return the samples that have ended."""
        samples, next_turns = [], []
        for sample in (sample for members in self._complete_rounds() for sample in members if sample.goes_on is None):
            sample.goes_on = sample.reply is not None and self._goes_on(sample, sample.reply.result())
            if not sample.goes_on:
                self._request_rewards(sample, sample.parts)
        complete = self._complete_rounds()  # only those that have the rewards of their objects, too
        self._rounds = [members for members in self._rounds if members not in complete]
        for sample in (sample for members in complete for sample in members):
            if sample.goes_on:
                next_turns.append(sample)
                continue
            self._end(sample)
            self.times[sample.number] = sample.requested_at, sample.ended_at[sample.turns - 1]
            samples.append(self._sample(sample))
        self._ask(next_turns)
        return samples

    def _complete_rounds(self) -> list[list[_Open]]:
        return [members for members in self._rounds if not any(sample.missing for sample in members)]

    def _end(self, sample: _Open) -> None:
        """Let the environment drop its object of a sample. Raises the errors of objects that were dropped before."""
        environment = self.settings_of(sample.number).environment
        if environment is None:
            return
        self._dropped.append(environment.end(sample.number, self._texts(sample.prompt, sample.parts)))
        for dropped in [dropped for dropped in self._dropped if dropped.done()]:
            self._dropped.remove(dropped)
            dropped.result()

    def _ask(self, samples: Sequence[_Open]) -> None:
        if not samples:
            return
        requests = [
            GenerationRequest(
                sample.number * self._max_turns + sample.turns,
                np.concatenate([self.prompts.tokens(sample.prompt), *(part.ids_N for part in sample.parts)]),
                self.plan.sample_seed(sample.number, sample.turns),
                self.settings_of(sample.number).max_new_tokens - sample.tokens,
                self.prompts.media_of(sample.prompt),
                sampling=self.settings_of(sample.number).sampling,
            )
            for sample in samples
        ]

        def ended(at: int, completion: Completion) -> None:
            self._ended(samples[at], samples[at].turns, completion)

        is_early = any(self.settings_of(sample.number).calls_from_any_thread for sample in samples)
        futures = self.engine.generate(requests, ended if is_early else None)
        for future, sample in zip(futures, samples, strict=True):
            self._futures[future], sample.in_job = sample, future.done()
            # it runs immediately if the future is done
            future.add_done_callback(partial(self._arrived, sample, sample.turns))

    def _arrived(self, sample: _Open, turn: int, future: Future[Completion]) -> None:
        """The engine calls this in its own thread when a future is done."""
        if not future.cancelled() and future.exception() is None:
            self._ended(sample, turn, future.result())

    def _ended(self, sample: _Open, turn: int, completion: Completion) -> None:
        """Record when a turn has ended, and make the calls about it that are possible in any thread."""
        sample.ended_at.setdefault(turn, time.monotonic())
        if self.settings_of(sample.number).calls_from_any_thread:
            self._call_about(sample, turn, completion)

    def _goes_on(self, sample: _Open, reply: Any) -> bool:
        """Add the reply to a sample; returns whether the model generates another turn."""
        settings = self.settings_of(sample.number)
        assert settings.environment is not None
        room = settings.max_new_tokens - sample.tokens
        ids = settings.environment.ids(reply, room)
        if not ids:
            return False
        sample.replies.append(reply)
        sample.is_cut = len(ids) >= room
        if room:
            sample.parts.append(_environment_tokens(ids[:room]))
        return not sample.is_cut

    def _reward_of(self, sample: Sample) -> Future[Reward]:
        of_object = None if sample.object_reward is None else done(sample.object_reward)
        return self._request_reward(sample.number, sample.prompt, [sample.completion], of_object)

    def _request_rewards(self, sample: _Open, parts: Sequence[Completion]) -> None:
        """Request the reward of a sample that has ended, and what its object gives for it, unless it is requested."""
        settings = self.settings_of(sample.number)
        with self._lock:
            if settings.object_gives_reward and sample.object_reward is None:
                assert settings.environment is not None
                sample.object_reward = settings.environment.reward(self._ended_turns(sample, parts))
            if settings.reward is not None:
                self._request_reward(sample.number, sample.prompt, parts, sample.object_reward)

    def _request_reward(
        self, number: int, prompt: int, parts: Sequence[Completion], of_object: Future[float] | None
    ) -> Future[Reward]:
        """Request the reward of a sample, unless it is requested. of_object: the part that its object gives."""
        reward = self.settings_of(number).reward
        assert reward is not None
        with self._lock:
            if number not in self._rewards:
                self._rewards[number] = reward.request(*self._texts(prompt, parts), self._turns(parts), of_object)
            return self._rewards[number]

    def _ended_turns(self, sample: _Open, parts: Sequence[Completion]) -> SampleTurns:
        """What the environment gets: the turns of the model, without one that was cut."""
        generated = [part for part in parts if part.versions_N[0] != NOT_GENERATED]
        turns = [part.ids_N for part in generated if part.finish == "stop"]
        return SampleTurns(sample.number, self._texts(sample.prompt, parts), turns, list(sample.replies))

    def _texts(self, prompt: int, parts: Sequence[Completion]) -> tuple[str, str, Any, str]:
        """The arguments of a reward or an environment: texts of prompt and completion, the record and its line."""
        prompt_text = self.tokenizer.decode(self.prompts.tokens(prompt))
        ids_N = np.concatenate([part.ids_N for part in parts])
        completion = self.tokenizer.decode(ids_N, skip_special_tokens=True)
        return prompt_text, completion, self.prompts.records[prompt], self.prompts.sources[prompt]

    def _turns(self, parts: Sequence[Completion]) -> list[Turn]:
        versions_N = np.concatenate([part.versions_N for part in parts])
        ids_N = np.concatenate([part.ids_N for part in parts])
        return turn_texts(self.tokenizer, ids_N, versions_N != NOT_GENERATED)

    def _sample(self, sample: _Open) -> Sample:
        versions_N = np.concatenate([part.versions_N for part in sample.parts])
        completion = Completion(
            np.concatenate([part.ids_N for part in sample.parts]),
            np.concatenate([part.log_probs_N for part in sample.parts]),
            versions_N,
            "length" if sample.is_cut else sample.parts[-1].finish,
        )
        environment = self.settings_of(sample.number).environment
        calls, errors = (0, 0) if environment is None else environment.call_counts(sample.replies)
        return Sample(
            sample.number,
            sample.prompt,
            completion,
            versions_N != NOT_GENERATED,
            object_reward=None if sample.object_reward is None else sample.object_reward.result(),
            tool_calls=calls,
            tool_errors=errors,
        )


def _with_reward(sample: Sample, reward: Reward) -> Sample:
    return replace(sample, reward=reward.value, reward_parts=reward.parts)


def _environment_tokens(ids: Sequence[int]) -> Completion:
    count = len(ids)
    return Completion(
        np.asarray(ids, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        np.full(count, NOT_GENERATED, dtype=np.int32),
        "stop",
    )
