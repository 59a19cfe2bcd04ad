"""Generates samples turn by turn: the model generates, an environment may answer, and the model goes on.

Without an environment, a sample is one turn. Replies of an environment are part of the sample, but not targets.
"""

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data import Documents
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.generation.prompt_plan import PromptPlan
from stillhouse.generation.rollout_engines import RolloutEngine
from stillhouse.generation.sample import Completion, GenerationRequest, Sample
from stillhouse.generation.user_functions import UserFunction, checked_reply, checked_reward
from stillhouse.preemption import OverdueError

#: the version of a token that no model generated
NOT_GENERATED = -1
#: `_reply_ids` first tokenizes _CHARACTERS characters per token that still fits into the sample. It doubles the
#: number of characters until they have more than 2 × (the tokens that fit) + _MARGIN tokens
_CHARACTERS, _MARGIN = 16, 64


@dataclass
class _Open:
    """A sample that is being generated.

    parts: the model's completions and the environment's replies so far, in their order.
    turns: the number of the model's turns so far.
    is_cut: whether the environment's last reply has used up the remaining tokens.
    requested_at: the time of the first request, in seconds of `time.monotonic`.
    """

    number: int
    prompt: int
    parts: list[Completion] = field(default_factory=list)
    turns: int = 0
    is_cut: bool = False
    requested_at: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(part.ids_N) for part in self.parts)


class SampleGenerator:
    """Requests samples from an engine, and returns the finished ones.

    max_new_tokens: the maximum number of tokens of a sample: all turns of the model and all replies together.
    reward, environment: see `user_functions.py`. If one of them is set, `prompts` must have the records of the data.
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
        reward: UserFunction | None = None,
        environment: UserFunction | None = None,
        max_turns: int = 1,
        placeholders: Sequence[int] = (),
    ):
        self.engine, self.prompts, self.plan, self.tokenizer = engine, prompts, plan, tokenizer
        self.max_new_tokens, self.max_turns = max_new_tokens, max_turns
        self.reward, self.environment, self.placeholders = reward, environment, frozenset(placeholders)
        self._futures: dict[Future[Completion], _Open] = {}
        self._answered: dict[Future[Completion], float] = {}
        #: for each finished sample, by its number: the times of its first request and of its last completion
        self.times: dict[int, tuple[float, float]] = {}

    @property
    def under_way(self) -> list[int]:
        """The numbers of the samples that are not finished."""
        return [sample.number for sample in self._futures.values()]

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Request samples. samples: pairs of a sample's number and its prompt's number."""
        now = time.monotonic()
        self._ask([_Open(number, prompt, requested_at=now) for number, prompt in samples])

    def finished(self, seconds: float) -> list[Sample]:
        """Return the samples finished since the last call. If there is none, wait up to `seconds` seconds for one.

        Raises ServerError if no server answers in time, ValueError if a reward or a reply is invalid, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        samples: list[Sample] = []
        while self._futures and not samples:
            done, _ = wait(self._futures, seconds, FIRST_COMPLETED)
            if not done:
                break
            # in the order of the requests, so that an engine in this process always gets the same batches
            next_turns = []
            for future in [future for future in self._futures if future in done]:
                sample = self._futures.pop(future)
                answered = self._answered.pop(future, time.monotonic())  # the callback may run after `wait`
                sample.parts.append(future.result())
                sample.turns += 1
                if self._goes_on(sample):
                    next_turns.append(sample)
                else:
                    self.times[sample.number] = sample.requested_at, answered
                    samples.append(self._sample(sample))
            self._ask(next_turns)
        return samples

    def salvage(self) -> list[Sample]:
        """Return the finished samples, for a checkpoint. This does not wait, and does not raise errors of samples.

        A sample remains under way if its reward is invalid, or if there is an environment.
        """
        samples: list[Sample] = []
        for future in [future for future in self._futures if future.done() and not future.cancelled()]:
            if future.exception() is not None or self.environment is not None:
                continue
            sample = replace(self._futures[future], parts=[future.result()])
            try:
                samples.append(self._sample(sample))
            except (ValueError, OverdueError):
                continue  # `finished` raises this error
            del self._futures[future]
            self._answered.pop(future, None)
        return samples

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
        futures = self.engine.generate(requests)
        for request in futures:  # if the future is already done, its callback runs immediately
            request.add_done_callback(lambda future: self._answered.__setitem__(future, time.monotonic()))
        self._futures |= dict(zip(futures, samples, strict=True))

    def _goes_on(self, sample: _Open) -> bool:
        """Call the environment; returns whether the model generates another turn."""
        if self.environment is None or sample.parts[-1].finish == "length" or sample.turns >= self.max_turns:
            return False
        reply = checked_reply(self.environment, *self._texts(sample))
        room = self.max_new_tokens - sample.tokens
        ids = self._reply_ids(reply, room) if reply else []
        if not self.placeholders.isdisjoint(ids):
            raise ValueError(
                f"rollout.environment: the reply to sample {sample.number} has the placeholder token of an image: "
                "expected text, because only prompts have images"
            )
        if not ids:
            return False
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

    def _texts(self, sample: _Open) -> tuple[str, str, Any, str]:
        prompt = self.tokenizer.decode(self.prompts.tokens(sample.prompt))
        ids_N = np.concatenate([part.ids_N for part in sample.parts])
        completion = self.tokenizer.decode(ids_N, skip_special_tokens=True)
        return prompt, completion, self.prompts.records[sample.prompt], self.prompts.sources[sample.prompt]

    def _sample(self, sample: _Open) -> Sample:
        versions_N = np.concatenate([part.versions_N for part in sample.parts])
        completion = Completion(
            np.concatenate([part.ids_N for part in sample.parts]),
            np.concatenate([part.log_probs_N for part in sample.parts]),
            versions_N,
            "length" if sample.is_cut else sample.parts[-1].finish,
        )
        reward = None if self.reward is None else checked_reward(self.reward, *self._texts(sample))
        return Sample(sample.number, sample.prompt, completion, versions_N != NOT_GENERATED, reward)


def _environment_tokens(ids: Sequence[int]) -> Completion:
    count = len(ids)
    return Completion(
        np.asarray(ids, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        np.full(count, NOT_GENERATED, dtype=np.int32),
        "stop",
    )
