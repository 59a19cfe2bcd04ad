"""Generates samples turn by turn: the model generates, an environment may answer, and the model goes on.

Without an environment, a sample is one turn. An environment's reply is part of the sample, but no target.
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
#: how many characters of a reply are tokenized at first, for each token that fits; it is read no further once it has
#: twice the tokens that fit and so many more
_CHARACTERS, _MARGIN = 16, 64


@dataclass
class _Open:
    """A sample that is being generated.

    parts: the model's completions and the environment's replies so far, in turn.
    turns: the number of the model's turns.
    is_cut: whether the environment has answered, and no room is left for another turn.
    requested_at: the time of the request, in seconds of `time.monotonic`.
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

    max_new_tokens: the most tokens of all turns of a sample together, including the environment's.
    reward, environment: see `user_functions.py`; they need the prompts' records.
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
    ):
        self.engine, self.prompts, self.plan, self.tokenizer = engine, prompts, plan, tokenizer
        self.max_new_tokens, self.max_turns = max_new_tokens, max_turns
        self.reward, self.environment = reward, environment
        self._futures: dict[Future[Completion], _Open] = {}
        self._answered: dict[Future[Completion], float] = {}
        #: by the numbers of finished samples: when they were asked for and when they were finished
        self.times: dict[int, tuple[float, float]] = {}

    @property
    def under_way(self) -> list[int]:
        """The numbers of the samples that are not finished."""
        return [sample.number for sample in self._futures.values()]

    def start(self, samples: Sequence[tuple[int, int]]) -> None:
        """Ask for samples. samples: the number of each sample, and the number of its prompt."""
        now = time.monotonic()
        self._ask([_Open(number, prompt, requested_at=now) for number, prompt in samples])

    def finished(self, seconds: float) -> list[Sample]:
        """The samples that are finished since the last call. Waits up to so many seconds until there is one.

        Raises ServerError if no server answers in time, ValueError for a reward or a reply that cannot be used, and
        OverdueError if one of the user's functions does not return after a signal.
        """
        samples: list[Sample] = []
        while self._futures and not samples:
            done, _ = wait(self._futures, seconds, FIRST_COMPLETED)
            if not done:
                break
            # in the order of the requests, so that an engine in this process is always asked for the same batches
            next_turns = []
            for future in [future for future in self._futures if future in done]:
                sample = self._futures.pop(future)
                answered = self._answered.pop(future, time.monotonic())  # its callback may come after `wait`
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
        """The finished samples, for a checkpoint. It does not wait, and does not raise the errors of other samples.

        A sample that an environment may answer, or whose reward cannot be used, stays under way.
        """
        samples: list[Sample] = []
        for future in [future for future in self._futures if future.done() and not future.cancelled()]:
            if future.exception() is not None or self.environment is not None:
                continue
            sample = replace(self._futures[future], parts=[future.result()])
            try:
                samples.append(self._sample(sample))
            except (ValueError, OverdueError):
                continue  # raised where the samples are waited for
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
            )
            for sample in samples
        ]
        futures = self.engine.generate(requests)
        for request in futures:  # called at once if the future is done already
            request.add_done_callback(lambda future: self._answered.__setitem__(future, time.monotonic()))
        self._futures |= dict(zip(futures, samples, strict=True))

    def _goes_on(self, sample: _Open) -> bool:
        """Let the environment answer; returns whether the model is to write another turn."""
        if self.environment is None or sample.parts[-1].finish == "length" or sample.turns >= self.max_turns:
            return False
        reply = checked_reply(self.environment, *self._texts(sample))
        room = self.max_new_tokens - sample.tokens
        ids = self._reply_ids(reply, room) if reply else []
        if not ids:
            return False
        sample.is_cut = len(ids) >= room
        if room:
            sample.parts.append(_environment_tokens(ids[:room]))
        return not sample.is_cut

    def _reply_ids(self, reply: str, room: int) -> list[int]:
        """The tokens of a reply. If it has far more tokens than there is room for, only its beginning is read."""
        characters = _CHARACTERS * (room + 1)
        while True:
            ids = tokenize(self.tokenizer, [reply[:characters]], special=False)[0]
            # the last tokens of a beginning are not those of the whole reply
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
    """An environment's tokens as a completion."""
    count = len(ids)
    return Completion(
        np.asarray(ids, dtype=np.int32),
        np.zeros(count, dtype=np.float32),
        np.full(count, NOT_GENERATED, dtype=np.int32),
        "stop",
    )
