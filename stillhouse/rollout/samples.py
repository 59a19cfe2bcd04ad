"""Samples on their way, turn by turn: the model generates, an environment may answer, and the model goes on.

`Samples` says which completions are needed, and takes them from an inbox. It knows no engine. Without an environment,
a sample is one turn. Replies of an environment are part of the sample, but not targets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.media_files import MediaFile
from stillhouse.rollout.open_sample import NOT_GENERATED, OpenSample, SourceSettings
from stillhouse.rollout.records import Completion, GenerationRequest, Inbox, Sample
from stillhouse.rollout.reward import PendingReward, Reward
from stillhouse.rollout.turns import done, turn_texts

#: seconds between two calls of `alive` while a sample waits for a completion, a reply or its reward
SECONDS_BETWEEN_LOOKS = 1.0


class SamplePlan(Protocol):
    """The part of a `PromptPlan` that generation needs."""

    def group_of(self, sample: int) -> int: ...
    def source_of(self, group: int) -> int: ...
    def sample_seed(self, sample: int, turn: int) -> int: ...


class Samples:
    """The samples under way. The first rank has them.

    sources: the settings of each source of `plan`.
    together: whether samples that are requested together go on together, after the replies to all of them. An engine
        in this job then always gets the same batches.
    alive: called about once per second while a method waits; may raise an error.
    """

    def __init__(
        self,
        prompts: Documents,
        plan: SamplePlan,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[SourceSettings],
        *,
        together: bool = False,
        alive: Callable[[], None] = lambda: None,
    ):
        self.prompts, self.plan, self.tokenizer = prompts, plan, tokenizer
        self.sources, self._together, self._alive = list(sources), together, alive
        self._max_turns = max(source.max_turns for source in sources)
        self._next: list[OpenSample] = []  # the samples whose next turn is not requested yet
        self._requested: dict[int, OpenSample] = {}  # by the number of the request
        #: the samples with a requested turn; those of one list go on together
        self._rounds: list[list[OpenSample]] = []
        self._finished: list[Sample] = []
        self._rewards: dict[int, PendingReward] = {}
        self._dropped: list[Future[None]] = []
        self._lock = threading.RLock()
        #: for each finished sample, by its number: the times of its first request and of its last completion
        self.times: dict[int, tuple[float, float]] = {}
        self.inbox = Inbox(is_early=any(source.calls_from_any_thread for source in sources))
        #: what `receive` takes: contents of the inbox, and futures of replies that are done
        self._arrivals: SimpleQueue[Any] = SimpleQueue() if self.inbox.is_early else self.inbox.arrivals
        if self.inbox.is_early:
            threading.Thread(target=self._read_early, name="inbox of samples", daemon=True).start()

    def close(self) -> None:
        """End the thread that reads the inbox."""
        self.inbox.arrivals.put(None)

    def settings_of(self, sample: int) -> SourceSettings:
        """The settings of the source to which the prompt of a sample belongs. sample: the sample's number."""
        return self.sources[self.plan.source_of(self.plan.group_of(sample))]

    @property
    def under_way(self) -> list[int]:
        """The numbers of the samples that are not finished."""
        return [sample.number for members in [self._next, *self._rounds] for sample in members]

    @property
    def has_turns(self) -> bool:
        """Whether samples of some source may have several turns."""
        return self._max_turns > 1

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Begin samples. samples: pairs of a sample's number and its prompt's number."""
        prompts, now = self.prompts, time.monotonic()
        has_media = prompts.has_media
        for number, prompt in samples:
            media = prompts.media_of(prompt) if has_media else ()
            self._next.append(self._opened(number, prompt, media, requested_at=now))

    def take_requests(self) -> list[GenerationRequest]:
        """Return the requests for the completions that are needed now; an engine must put these into the inbox."""
        samples, self._next = self._next, []
        requests = [
            GenerationRequest(
                sample.number * self._max_turns + sample.turns,
                np.concatenate([sample.prompt_ids, *(part.ids_N for part in sample.parts)]),
                self.plan.sample_seed(sample.number, sample.turns),
                sample.settings.max_new_tokens - sample.tokens,
                sample.media,
                sampling=sample.settings.sampling,
            )
            for sample in samples
        ]
        with self._lock:
            for request, sample in zip(requests, samples, strict=True):
                sample.is_requested, sample.goes_on = True, None
                self._requested[request.number] = sample
        if samples:
            self._rounds += [samples] if self._together else [[sample] for sample in samples]
        return requests

    def next_requests(self) -> list[GenerationRequest]:
        """Wait until completions are needed, and return their requests; [] if no sample is under way.

        Raises the errors of `receive`.
        """
        while not self._next and self._rounds:
            if not self.receive(SECONDS_BETWEEN_LOOKS):
                self._alive()
        return self.take_requests()

    def receive(self, seconds: float) -> bool:
        """Take what has arrived, and wait up to `seconds` seconds for the first one; returns whether there is one.

        Raises ServerError if no server answers in time, UserFunctionError if a reward or a reply is invalid, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        errors, completed, arrivals = list[Exception](), list[OpenSample](), self._arrived(seconds)
        for number, result, at in (arrival for arrival in arrivals if isinstance(arrival, tuple)):
            if number not in self._requested:  # it has arrived before
                continue
            if isinstance(result, Exception):
                errors.append(result)
            else:
                completed.append(self._add(number, result, at))
        for sample in completed:  # a call may fail; a checkpoint then has all completions
            self._call_about(sample, sample.parts, sample.turns - 1)
        if errors:
            raise errors[0]
        self._end_rounds()
        return bool(arrivals)

    def finished(self) -> list[Sample]:
        """Return the samples finished since the last call. Their rewards may still be computed, see `rewarded`."""
        samples, self._finished = self._finished, []
        return samples

    def rewarded(self, sample: Sample) -> Sample:
        """Wait for the reward of a finished sample. Raises UserFunctionError if the reward is invalid."""
        if self.settings_of(sample.number).reward is None or sample.reward is not None:
            return sample
        reward = self._reward_of(sample)
        while wait(reward.futures, SECONDS_BETWEEN_LOOKS).not_done:
            self._alive()
        rewarded = _with_reward(sample, reward.result())
        self._rewards.pop(sample.number, None)
        return rewarded

    def has_reward(self, sample: Sample) -> bool:
        """Whether `rewarded` needs not wait. A sample of a checkpoint may have no reward; it is then requested."""
        if self.settings_of(sample.number).reward is None or sample.reward is not None:
            return True
        return self._reward_of(sample).is_done

    def with_present_reward(self, sample: Sample) -> Sample:
        """The sample with its reward, if it is computed already. Does not wait, and raises no error of the reward."""
        reward = self._rewards.get(sample.number)
        if reward is None or not reward.is_done:
            return sample
        with suppress(Exception):
            return _with_reward(sample, reward.result())
        return sample

    def wait_until_dropped(self) -> None:
        """Wait until the environment has dropped its objects of all samples that have ended.

        Raises ValueError if the end of an object fails.
        """
        for part in [part for source in self.sources if source.reward is not None for part in source.reward.parts]:
            if part.repeated is not None:
                part.repeated.compare()
        while wait(self._dropped, SECONDS_BETWEEN_LOOKS).not_done:
            self._alive()
        while self._dropped:
            self._dropped.pop(0).result()

    def salvage(self) -> list[Sample]:
        """Return the finished samples, for a checkpoint. This does not wait, and does not raise errors of samples.

        They have no rewards yet. A sample remains under way if there is an environment.
        """
        for number, result, at in (arrival for arrival in self._arrived(0.0) if isinstance(arrival, tuple)):
            if number in self._requested and isinstance(result, Completion):
                self._add(number, result, at)
        ended = [
            sample
            for members in self._rounds
            for sample in members
            if not sample.is_requested and sample.settings.environment is None
        ]
        self._rounds = [[sample for sample in members if sample not in ended] for members in self._rounds]
        self._rounds = [members for members in self._rounds if members]
        return [*self.finished(), *(sample.sample() for sample in ended)]

    def _opened(
        self, number: int, prompt: int, media: Sequence[MediaFile] = (), requested_at: float = 0.0
    ) -> OpenSample:
        start, stop = self.prompts.offsets[prompt : prompt + 2]
        record = self.prompts.records[prompt] if self.prompts.records else {}
        return OpenSample(
            number,
            prompt,
            self.settings_of(number),
            self.prompts.tokens_N[start:stop],
            record,
            self.prompts.sources[prompt],
            media,
            requested_at=requested_at,
        )

    def _arrived(self, seconds: float) -> list[Any]:
        """What has arrived: contents of the inbox, and futures of replies."""
        arrivals = []
        with suppress(Empty):
            arrivals.append(self._arrivals.get(timeout=seconds) if seconds else self._arrivals.get_nowait())
            while True:
                arrivals.append(self._arrivals.get_nowait())
        return arrivals

    def _read_early(self) -> None:
        """Make the calls about completions as soon as they have arrived, in a thread."""
        for arrival in iter(self.inbox.arrivals.get, None):
            number, result, _ = arrival
            with suppress(Exception), self._lock:  # `receive` repeats a call that fails, and raises its error
                sample = self._requested.get(number)
                if sample is not None and sample.settings.calls_from_any_thread and isinstance(result, Completion):
                    self._call_about(sample, [*sample.parts, result], sample.turns)
            self._arrivals.put(arrival)

    def _add(self, number: int, completion: Completion, at: float) -> OpenSample:
        """Add the completion of a request to its sample, and return it. at: the time of its arrival."""
        with self._lock:
            sample = self._requested.pop(number)
            sample.parts.append(completion)
            sample.turns, sample.is_requested, sample.ended_at = sample.turns + 1, False, at
        return sample

    def _call_about(self, sample: OpenSample, parts: Sequence[Completion], turn: int) -> None:
        """Request the reply to a turn, or the rewards of a sample that ends with it; once for a turn."""
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
                    reply.add_done_callback(self._arrivals.put)  # it ends a wait of `receive`
            sample.reply_calls[turn] = call
            if call is None:
                self._request_rewards(sample, parts)

    def _end_rounds(self) -> None:
        """Collect the next turns of all rounds whose replies have arrived, and the samples that have ended."""
        for sample in (sample for members in self._complete_rounds() for sample in members if sample.goes_on is None):
            if not sample.add_reply():
                self._request_rewards(sample, sample.parts)
        complete = self._complete_rounds()  # only those that have the rewards of their objects, too
        self._rounds = [members for members in self._rounds if members not in complete]
        for sample in (sample for members in complete for sample in members):
            if sample.goes_on:
                self._next.append(sample)
                continue
            self._end(sample)
            self.times[sample.number] = sample.requested_at, sample.ended_at
            self._finished.append(sample.sample())

    def _complete_rounds(self) -> list[list[OpenSample]]:
        return [members for members in self._rounds if not any(sample.is_waiting for sample in members)]

    def _end(self, sample: OpenSample) -> None:
        """Let the environment drop its object of a sample. Raises the errors of objects that were dropped before."""
        environment = sample.settings.environment
        if environment is None:
            return
        self._dropped.append(environment.end(sample.number, sample.texts(self.tokenizer, sample.parts)))
        for dropped in [dropped for dropped in self._dropped if dropped.done()]:
            self._dropped.remove(dropped)
            dropped.result()

    def _reward_of(self, sample: Sample) -> PendingReward:
        """The reward of a finished sample, which may be of a checkpoint."""
        if sample.number not in self._rewards:
            opened = self._opened(sample.number, sample.prompt)
            opened.object_reward = None if sample.object_reward is None else done(sample.object_reward)
            self._request_rewards(opened, [sample.completion])
        return self._rewards[sample.number]

    def _request_rewards(self, sample: OpenSample, parts: Sequence[Completion]) -> None:
        """Request the reward of a sample that has ended, and what its object gives for it, unless it is requested."""
        with self._lock:
            if sample.settings.object_gives_reward and sample.object_reward is None:
                assert sample.settings.environment is not None
                sample.object_reward = sample.settings.environment.reward(sample.ended_turns(self.tokenizer, parts))
                sample.object_reward.add_done_callback(self._arrivals.put)
            if sample.settings.reward is not None and sample.number not in self._rewards:
                ids_N = np.concatenate([part.ids_N for part in parts])
                is_generated_N = np.concatenate([part.versions_N for part in parts]) != NOT_GENERATED
                turns = turn_texts(self.tokenizer, ids_N, is_generated_N)
                texts = sample.texts(self.tokenizer, parts)
                self._rewards[sample.number] = sample.settings.reward.request(*texts, turns, sample.object_reward)


def _with_reward(sample: Sample, reward: Reward) -> Sample:
    return replace(sample, reward=reward.value, reward_parts=reward.parts)
