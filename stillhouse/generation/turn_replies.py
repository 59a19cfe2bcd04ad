"""What follows a turn of the model: the text of an environment, or the replies of the tools that the turn calls."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.render.tokenizers import tokenize
from stillhouse.data.render.tool_format import Call, ToolFormat
from stillhouse.display import first_line
from stillhouse.generation.user_functions import EnvironmentCall
from stillhouse.user_code.episodes import Episode
from stillhouse.user_code.functions import UserFunctionError
from stillhouse.user_code.tools import ERROR
from stillhouse.user_code.worker_pool import CallLostError

#: `beginning_ids` first tokenizes _CHARACTERS characters per token. It doubles the number of characters until they
#: have more than 2 × (the tokens that are needed) + _MARGIN tokens
_CHARACTERS, _MARGIN = 16, 64
#: the end of a reply that was cut
_CUT = "\n[The rest of this reply was cut.]"
#: the reply of tools that have not returned within `rollout.worker_timeout`, or have ended their process
_LOST = f"{ERROR}the tool did not return"

#: prompt, completion so far, record, and the record's `file:line`
CallArguments = tuple[str, str, Mapping[str, Any], str]


@dataclass(frozen=True)
class SampleTurns:
    """A sample after a turn of the model.

    arguments: of the user's function.
    turns: the token ids of each turn of the model, int32.
    replies: the results of the earlier requests. At the sample's end, there may be one for the last turn, too.
    """

    number: int
    arguments: CallArguments
    turns: Sequence[np.ndarray]
    replies: Sequence[Any]


class TurnReplies(Protocol):
    """Replies to the turns of samples. May be called from any thread."""

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        """Request the reply to the last turn; None if the sample ends with it. The future raises
        UserFunctionError.
        """
        ...

    def ids(self, reply: Any, most: int) -> list[int]:
        """The tokens of a reply, or more than `most` of them from its beginning; [] if the sample ends.

        Raises UserFunctionError for a reply that a sample cannot have.
        """
        ...

    def call_counts(self, replies: Sequence[Any]) -> tuple[int, int]:
        """How many calls of tools have had these replies to a sample, and how many of them were errors."""
        ...

    def reward(self, sample: SampleTurns) -> Future[float]:
        """Request the reward that the object of a sample gives at its end. The future raises
        UserFunctionError.
        """
        ...

    def end(self, number: int, arguments: CallArguments) -> Future[None]:
        """Drop the object of a sample that has ended."""
        ...


class TextReplies:
    """The texts of an environment (`rollout.environment`), which may have any tokens but those of images.

    placeholders: the ids of the tokens that stand for features of images.
    """

    def __init__(self, call: EnvironmentCall, tokenizer: PreTrainedTokenizerBase, placeholders: Sequence[int] = ()):
        self._call, self._tokenizer, self._placeholders = call, tokenizer, frozenset(placeholders)

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        return self._call(*sample.arguments, self._episode(sample))

    def reward(self, sample: SampleTurns) -> Future[float]:
        return self._call(*sample.arguments, replace(self._episode(sample), wants_reward=True))

    def _episode(self, sample: SampleTurns) -> Episode:
        turns = [self._tokenizer.decode(ids_N, skip_special_tokens=True) for ids_N in sample.turns]
        return Episode(sample.number, tuple(turns), tuple(sample.replies))

    def ids(self, reply: str | None, most: int) -> list[int]:
        ids = beginning_ids(self._tokenizer, reply, most) if reply else []
        if not self._placeholders.isdisjoint(ids):
            raise UserFunctionError(
                f"rollout.environment: the reply {(reply or '')[:80]!r} has the placeholder token of an image: "
                "expected text, because only prompts have images"
            )
        return ids

    def call_counts(self, replies: Sequence[Any]) -> tuple[int, int]:
        return 0, 0

    def end(self, number: int, arguments: CallArguments) -> Future[None]:
        return self._call(*arguments, Episode(number))


@dataclass(frozen=True)
class ToolReply:
    """The replies to a turn.

    names, texts: of the tools that the turn calls, and of their replies. ends: whether the turn lacks its end marker.
    """

    names: list[str]
    texts: list[str]
    ends: bool


class ToolReplies:
    """The replies of the tools that a turn calls, as the chat template writes them (`rollout.tools`).

    A turn ends with the template's end marker, or with one of `rollout.stop`. A turn that ends with another special
    token, or that has no call, ends its sample.

    most_tokens: of the text of one reply. A longer one is cut.
    have_state: whether some tools have objects. Only other tools may be lost without an error.
    warn: is called, in any thread, with a line about calls that are lost.
    """

    def __init__(
        self,
        call: EnvironmentCall,
        tool_format: ToolFormat,
        most_tokens: int,
        *,
        have_state: bool,
        warn: Callable[[str], None],
    ):
        self._call, self._format, self._most_tokens, self._warn = call, tool_format, most_tokens, warn
        self._have_state, self._tokenizer = have_state, tool_format.tokenizer
        added = self._tokenizer.added_tokens_decoder
        self._special = {index for index, token in added.items() if token.special} - {tool_format.marker_id}

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        calls = self._calls(sample.turns[-1])
        if not calls:
            return None
        ends = int(sample.turns[-1][-1]) != self._format.marker_id

        def reply(texts: list[str]) -> ToolReply:
            return ToolReply([call.name for call in calls], texts, ends)

        def lost(error: CallLostError) -> ToolReply | None:
            if self._have_state:
                return None
            self._warn(f"the reply of the tools is {_LOST!r}: {first_line(error)}")
            return reply([_LOST] * len(calls))

        return _mapped(self._call(*sample.arguments, self._episode(sample)), reply, lost)

    def reward(self, sample: SampleTurns) -> Future[float]:
        return self._call(*sample.arguments, replace(self._episode(sample), wants_reward=True))

    def ids(self, reply: ToolReply, most: int) -> list[int]:
        return self._format.reply_ids(reply.names, [self._bounded(text) for text in reply.texts], ends=reply.ends)

    def call_counts(self, replies: Sequence[ToolReply]) -> tuple[int, int]:
        texts = [text for reply in replies for text in reply.texts]
        return len(texts), sum(text.startswith(ERROR) for text in texts)

    def end(self, number: int, arguments: CallArguments) -> Future[None]:
        return self._call(*arguments, Episode(number))

    def _episode(self, sample: SampleTurns) -> Episode:
        made = [[(call.name, call.arguments, call.problem) for call in self._calls(ids_N)] for ids_N in sample.turns]
        return Episode(sample.number, tuple(made), tuple(reply.texts for reply in sample.replies))

    def _calls(self, ids_N: np.ndarray) -> list[Call]:
        """The calls that a turn makes; none if it ends with another special token than the template's marker."""
        if int(ids_N[-1]) in self._special:
            return []
        ids = ids_N[:-1] if ids_N[-1] == self._format.marker_id else ids_N
        return self._format.calls(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _bounded(self, text: str) -> str:
        """The text, or its beginning and a sentence about the rest, together with at most `most_tokens` tokens."""
        most, count = self._most_tokens, _CHARACTERS * (self._most_tokens + 1)
        while count < len(text) and len(self._format.text_ids(text[:count])) <= 2 * most + _MARGIN:
            count *= 2
        if count >= len(text) and len(self._format.text_ids(text)) <= most:
            return text
        kept, too_many = 0, min(count, len(text)) + 1
        while too_many - kept > 1:
            middle = (kept + too_many) // 2
            if len(self._format.text_ids(text[:middle] + _CUT)) <= most:
                kept = middle
            else:
                too_many = middle
        return text[:kept] + _CUT


def beginning_ids(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> list[int]:
    """The tokens of a text. Of a text with far more than `most` tokens, only the beginning is tokenized."""
    characters = _CHARACTERS * (most + 1)
    while True:
        ids = tokenize(tokenizer, [text[:characters]], special=False)[0]
        # near its end, a cut text may have other tokens than the full text, so a margin of tokens is needed
        if characters >= len(text) or len(ids) > 2 * most + _MARGIN:
            return ids
        characters *= 2


def _mapped(
    result: "Future[list[str]]",
    reply: Callable[[list[str]], ToolReply],
    lost: Callable[[CallLostError], ToolReply | None],
) -> "Future[ToolReply]":
    """The reply made of the texts of `result`; if the calls are lost, that of `lost`, or the error if it is None."""
    mapped: Future[ToolReply] = Future()

    def done(_: "Future[list[str]]") -> None:
        error = result.exception()
        if isinstance(error, CallLostError) and (of_lost := lost(error)) is not None:
            mapped.set_result(of_lost)
        elif error is not None:
            mapped.set_exception(error)
        else:
            mapped.set_result(reply(result.result()))

    result.add_done_callback(done)
    return mapped
