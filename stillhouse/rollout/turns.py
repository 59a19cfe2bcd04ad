"""The turns of a sample, and the replies that a registered environment gives to the turns."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.rollout.records import NOT_GENERATED, Completion
from stillhouse.user_code.environment import Episode
from stillhouse.user_code.functions import Turn

#: the prompt, the completion so far, the record, and the record's `file:line`
CallArguments = tuple[str, str, Mapping[str, Any], str]


class Reply(NamedTuple):
    """The reply to a turn.

    content: the text of an environment, or the texts that the called tools return.
    ids: the reply's tokens. Of a long reply, these can be the first tokens only, at least as many as were requested.
    calls, errors: the number of tool calls that the reply answers, and the number of errors among the answers.
    """

    content: Any
    ids: Sequence[int]
    calls: int = 0
    errors: int = 0


@dataclass(frozen=True)
class SampleTurns:
    """A sample after a turn of the model.

    arguments: the arguments for the user's function.
    turns: the token ids of each turn of the model, int32.
    replies: the replies to earlier turns. At the end of the sample, the last turn may have a reply, too.
    """

    number: int
    arguments: CallArguments
    turns: Sequence[np.ndarray]
    replies: Sequence[Reply]


class Calls(Protocol):
    """Calls a function by its configuration key and path, or a server by its configuration key and URL. If a call
    fails, its future raises UserFunctionError.
    """

    def request(self, key: str, path: str, *arguments: Any) -> Future[Any]: ...


@dataclass(frozen=True)
class EpisodeCalls:
    """The calls of one environment, or of tools, by their key and path.

    The calls get the turns of a sample as an `Episode`. An episode without turns ends the sample's object.

    takes_episodes: whether the calls get episodes. An environment that is a function has no state, and needs no
        episodes.
    """

    calls: Calls
    key: str
    path: str
    takes_episodes: bool = True

    def request(self, arguments: CallArguments, episode: Episode) -> Future[Any]:
        if self.takes_episodes:
            return self.calls.request(self.key, self.path, *arguments, episode)
        return self.calls.request(self.key, self.path, *arguments) if episode.turns else done(None)


def done(value: Any) -> Future[Any]:
    """A future that is done and has this result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class TurnReplies(ABC):
    """Replies to the turns of samples. The methods can be called in any thread.

    calls: the calls of the user's functions.
    """

    def __init__(self, calls: EpisodeCalls, tokenizer: PreTrainedTokenizerBase):
        self._calls, self._tokenizer = calls, tokenizer

    @abstractmethod
    def request(self, sample: SampleTurns) -> Future[Any] | None:
        """Request the reply to the last turn, and return its future, which `reply` then gets. Returns None if the
        sample ends with this turn.
        """

    @abstractmethod
    def reply(self, sample: SampleTurns, future: Future[Any], most: int) -> Reply | None:
        """Return the reply to the last turn. If the reply is None or has no tokens, the sample ends.

        sample, future: the argument and the result of `request`. The future must be done.
        most: the number of tokens that the caller needs from the beginning of the reply.

        Raises UserFunctionError if the call has failed, or if a sample cannot have this reply.
        """

    def reward(self, sample: SampleTurns) -> Future[float]:
        """Request the reward that the object of a sample gives at the end. If the object fails, the future raises
        UserFunctionError.
        """
        return self._calls.request(sample.arguments, replace(self._episode(sample), wants_reward=True))

    def end(self, number: int, arguments: CallArguments) -> Future[None]:
        """Drop the object of a sample that has ended."""
        return self._calls.request(arguments, Episode(number))

    def _episode(self, sample: SampleTurns) -> Episode:
        """The turns of a sample and the replies to them, in the form for the user's object."""
        turns = tuple(self._turn(ids_N) for ids_N in sample.turns)
        return Episode(sample.number, turns, tuple(reply.content for reply in sample.replies))

    def _turn(self, ids_N: np.ndarray) -> Any:
        return self._tokenizer.decode(ids_N, skip_special_tokens=True)


def turn_texts(tokenizer: PreTrainedTokenizerBase, parts: Sequence[Completion]) -> list[Turn]:
    """Return the texts of the turns and the replies in their order, without special tokens. `parts` can also be one
    joined completion, from a checkpoint, because there is always a token of a reply between two turns of the model.
    """
    completion = Completion.joined(parts)
    ids_N, is_generated_N = completion.ids_N, completion.versions_N != NOT_GENERATED
    borders = [0, *(np.flatnonzero(np.diff(is_generated_N)) + 1).tolist(), len(ids_N)]
    return [
        {
            "role": "student" if is_generated_N[start] else "environment",
            "text": tokenizer.decode(ids_N[start:stop], skip_special_tokens=True),
        }
        for start, stop in pairwise(borders)
    ]
