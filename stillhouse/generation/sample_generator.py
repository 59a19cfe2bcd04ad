"""Generates samples turn by turn: the model generates, an environment may answer, and the model goes on.

Without an environment, a sample is one turn. Replies of an environment are part of the sample, but not targets.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.generation.prompt_plan import PromptPlan
from stillhouse.generation.rollout_engines import RolloutEngine
from stillhouse.generation.sample import Completion, GenerationRequest, Sample
from stillhouse.generation.user_functions import CompletionCall, EnvironmentCall
from stillhouse.user_code.episodes import Episode

#: the version of a token that no model generated
NOT_GENERATED = -1
#: `_reply_ids` first tokenizes _CHARACTERS characters per token that still fits into the sample. It doubles the
#: number of characters until they have more than 2 × (the tokens that fit) + _MARGIN tokens
_CHARACTERS, _MARGIN = 16, 64
#: seconds between two calls of `alive` while a sample waits for its reward
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass
class _Open:
    """A sample that is being generated.

    parts: the model's completions and the environment's replies so far, in their order.
    turns: the number of the model's turns so far.
    replies: the texts of the environment's replies so far.
    is_cut: whether the environment's last reply has used up the remaining tokens.
    requested_at: the time of the first request, in seconds of `time.monotonic`.
    in_job: whether the engine has generated the present turn before `generate` returned. Such samples of one request
        go on together, so that an engine in this job always gets the same batches.
    """

    number: int
    prompt: int
    parts: list[Completion] = field(default_factory=list)
    turns: int = 0
    replies: list[str] = field(default_factory=list)
    is_cut: bool = False
    requested_at: float = 0.0
    answered_at: float = 0.0
    in_job: bool = False

    @property
    def tokens(self) -> int:
        return sum(len(part.ids_N) for part in self.parts)


#: samples that go on together, each with the environment's reply; None: the sample has ended
_Round = list[tuple[_Open, Future[str | None] | None]]


class SampleGenerator:
    """Requests samples from an engine, and returns the finished ones.

    max_new_tokens: the maximum number of tokens of a sample: all turns of the model and all replies together.
    reward, environment: see `user_functions.py`. If one of them is set, `prompts` must have the records of the data.
    calls_from_any_thread: whether a reward is requested as soon as the engine has generated a completion, in the
        engine's thread. Otherwise, rewards are requested when `finished` returns their samples.
    placeholders: the ids of the tokens that stand for features of images, which a reply must not have.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Documents,
        plan: PromptPlan,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        *,
        reward: CompletionCall | None = None,
        environment: EnvironmentCall | None = None,
        calls_from_any_thread: bool = False,
        max_turns: int = 1,
        placeholders: Sequence[int] = (),
    ):
        self.engine, self.prompts, self.plan, self.tokenizer = engine, prompts, plan, tokenizer
        self.max_new_tokens, self.max_turns = max_new_tokens, max_turns
        self.reward, self.environment, self.placeholders = reward, environment, frozenset(placeholders)
        self._rewards_early = reward is not None and environment is None and calls_from_any_thread
        self._futures: dict[Future[Completion], _Open] = {}
        self._answered: dict[Future[Completion], float] = {}
        self._rounds: list[_Round] = []
        self._rewards: dict[int, Future[float]] = {}
        self._dropped: list[Future[None]] = []
        self._lock = threading.Lock()
        #: for each finished sample, by its number: the times of its first request and of its last completion
        self.times: dict[int, tuple[float, float]] = {}

    @property
    def under_way(self) -> list[int]:
        """The numbers of the samples that are not finished."""
        return [sample.number for sample in self._open]

    @property
    def is_open_in_job(self) -> bool:
        """Whether an engine in this job has samples that wait for replies of the environment."""
        return any(sample.in_job for sample in self._open)

    @property
    def _open(self) -> list[_Open]:
        return [*self._futures.values(), *(sample for together in self._rounds for sample, _ in together)]

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Request samples. samples: pairs of a sample's number and its prompt's number."""
        now = time.monotonic()
        self._ask([_Open(number, prompt, requested_at=now) for number, prompt in samples])

    def finished(self, seconds: float) -> list[Sample]:
        """Return the samples finished since the last call. If there is none, wait up to `seconds` seconds for one.

        Their rewards may still be computed, see `rewarded`.

        Raises ServerError if no server answers in time, ValueError if a reward or a reply is invalid, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        samples: list[Sample] = []
        while (self._futures or self._replies) and not samples:
            waiting: list[Future[Any]] = [*self._futures, *self._replies]
            done, _ = wait(waiting, seconds, FIRST_COMPLETED)
            if not done:
                break
            # in the order of the requests, so that an engine in this process always gets the same batches
            completed = [self._completed(future) for future in [*self._futures] if future in done]
            together = [sample for sample in completed if sample.in_job]
            rounds = [together] if together else []
            rounds += [[sample] for sample in completed if not sample.in_job]
            self._rounds += [[(sample, self._reply_to(sample)) for sample in members] for members in rounds]
            samples = self._end_rounds()
        return samples

    def rewarded(self, sample: Sample, alive: Callable[[], None]) -> Sample:
        """Wait for the reward of a finished sample. alive: called about once per second while waiting.

        Raises ValueError if the reward is invalid.
        """
        if self.reward is None or sample.reward is not None:
            return sample
        future = self._reward_of(sample)
        while not wait([future], SECONDS_BETWEEN_LOOKS).done:
            alive()
        rewarded = replace(sample, reward=future.result())
        self._rewards.pop(sample.number, None)
        return rewarded

    def has_reward(self, sample: Sample) -> bool:
        """Whether `rewarded` needs not wait. A sample of a checkpoint may have no reward; it is then requested."""
        if self.reward is None or sample.reward is not None:
            return True
        return self._reward_of(sample).done()

    def with_present_reward(self, sample: Sample) -> Sample:
        """The sample with its reward, if it is computed already. Does not wait, and raises no error of the reward."""
        future = self._rewards.get(sample.number)
        if future is None or not future.done() or future.exception() is not None:
            return sample
        return replace(sample, reward=future.result())

    def salvage(self) -> list[Sample]:
        """Return the finished samples, for a checkpoint. This does not wait, and does not raise errors of samples.

        They have no rewards yet. A sample remains under way if there is an environment.
        """
        samples: list[Sample] = []
        for future in [future for future in self._futures if future.done() and not future.cancelled()]:
            if future.exception() is None and self.environment is None:
                samples.append(self._sample(self._completed(future)))
        return samples

    @property
    def _replies(self) -> list[Future[str | None]]:
        return [reply for together in self._rounds for _, reply in together if reply is not None and not reply.done()]

    def _completed(self, future: Future[Completion]) -> _Open:
        """Add the completion of a future that is done to its sample. Raises the future's error."""
        sample = self._futures.pop(future)
        sample.answered_at = self._answered.pop(future, time.monotonic())  # the callback may run after `wait`
        sample.parts.append(future.result())
        sample.turns += 1
        return sample

    def _reply_to(self, sample: _Open) -> Future[str | None] | None:
        """Request the environment's reply to a turn; None if the sample ends without one."""
        if self.environment is None or sample.parts[-1].finish == "length" or sample.turns >= self.max_turns:
            return None
        turns = [self._text(part) for part in sample.parts if part.versions_N[0] != NOT_GENERATED]
        episode = Episode(sample.number, tuple(turns), tuple(sample.replies))
        return self.environment(*self._texts(sample.prompt, sample.parts), episode)

    def _end_rounds(self) -> list[Sample]:
        """Request the next turns of all rounds whose replies have arrived, and return the samples that have ended."""
        samples, next_turns = [], []
        complete = [members for members in self._rounds if all(reply is None or reply.done() for _, reply in members)]
        self._rounds = [members for members in self._rounds if members not in complete]
        for sample, reply in (entry for members in complete for entry in members):
            if reply is not None and self._goes_on(sample, reply.result()):
                next_turns.append(sample)
                continue
            self._end(sample)
            self.times[sample.number] = sample.requested_at, sample.answered_at
            samples.append(self._sample(sample))
            if self.reward is not None:
                self._reward_of(samples[-1])
        self._ask(next_turns)
        return samples

    def _end(self, sample: _Open) -> None:
        """Let the environment drop its object of a sample. Raises the errors of objects that were dropped before."""
        if self.environment is None:
            return
        self._dropped.append(self.environment(*self._texts(sample.prompt, sample.parts), Episode(sample.number)))
        for dropped in [dropped for dropped in self._dropped if dropped.done()]:
            self._dropped.remove(dropped)
            dropped.result()

    def _ask(self, samples: Sequence[_Open]) -> None:
        if not samples:
            return
        requests = [
            GenerationRequest(
                sample.number * self.max_turns + sample.turns,
                np.concatenate([self.prompts.tokens(sample.prompt), *(part.ids_N for part in sample.parts)]),
                self.plan.sample_seed(sample.number, sample.turns),
                self.max_new_tokens - sample.tokens,
                self.prompts.images_of(sample.prompt),
            )
            for sample in samples
        ]
        for future, sample in zip(self.engine.generate(requests), samples, strict=True):
            self._futures[future], sample.in_job = sample, future.done()
            future.add_done_callback(partial(self._arrived, sample))  # it runs immediately if the future is done

    def _arrived(self, sample: _Open, future: Future[Completion]) -> None:
        """Record when a completion has arrived, and request its reward. The engine calls this in its own thread."""
        self._answered[future] = time.monotonic()
        if self._rewards_early and not future.cancelled() and future.exception() is None:
            self._request_reward(sample.number, sample.prompt, future.result())

    def _goes_on(self, sample: _Open, reply: str | None) -> bool:
        """Add the environment's reply to a sample; returns whether the model generates another turn."""
        room = self.max_new_tokens - sample.tokens
        ids = self._reply_ids(reply, room) if reply else []
        if not self.placeholders.isdisjoint(ids):
            raise ValueError(
                f"rollout.environment: the reply to sample {sample.number} has the placeholder token of an image: "
                "expected text, because only prompts have images"
            )
        if not ids:
            return False
        sample.replies.append(reply or "")
        sample.is_cut = len(ids) >= room
        if room:
            sample.parts.append(_environment_tokens(ids[:room]))
        return not sample.is_cut

    def _reply_ids(self, reply: str, room: int) -> list[int]:
        """The tokens of a reply. Of a reply with far more than `room` tokens, only the beginning is tokenized."""
        characters = _CHARACTERS * (room + 1)
        while True:
            ids = tokenize(self.tokenizer, [reply[:characters]], special=False)[0]
            # near its end, a cut text may have other tokens than the full reply, so a margin of tokens is needed
            if characters >= len(reply) or len(ids) > 2 * room + _MARGIN:
                return ids
            characters *= 2

    def _reward_of(self, sample: Sample) -> Future[float]:
        return self._request_reward(sample.number, sample.prompt, sample.completion)

    def _request_reward(self, number: int, prompt: int, completion: Completion) -> Future[float]:
        """Request the reward of a sample, unless it is requested already."""
        assert self.reward is not None
        with self._lock:
            if number not in self._rewards:
                self._rewards[number] = self.reward(*self._texts(prompt, [completion]))
            return self._rewards[number]

    def _texts(self, prompt: int, parts: Sequence[Completion]) -> tuple[str, str, Any, str]:
        """The arguments of a reward or an environment: texts of prompt and completion, the record and its line."""
        prompt_text = self.tokenizer.decode(self.prompts.tokens(prompt))
        ids_N = np.concatenate([part.ids_N for part in parts])
        completion = self.tokenizer.decode(ids_N, skip_special_tokens=True)
        return prompt_text, completion, self.prompts.records[prompt], self.prompts.sources[prompt]

    def _text(self, part: Completion) -> str:
        return self.tokenizer.decode(part.ids_N, skip_special_tokens=True)

    def _sample(self, sample: _Open) -> Sample:
        versions_N = np.concatenate([part.versions_N for part in sample.parts])
        completion = Completion(
            np.concatenate([part.ids_N for part in sample.parts]),
            np.concatenate([part.log_probs_N for part in sample.parts]),
            versions_N,
            "length" if sample.is_cut else sample.parts[-1].finish,
        )
        return Sample(sample.number, sample.prompt, completion, versions_N != NOT_GENERATED)


def _environment_tokens(ids: Sequence[int]) -> Completion:
    count = len(ids)
    return Completion(
        np.asarray(ids, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        np.full(count, NOT_GENERATED, dtype=np.int32),
        "stop",
    )
