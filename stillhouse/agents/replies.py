"""The replies to turns of the model: texts of an environment, or the replies of the tools that a turn calls."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.agents.episodes import ERROR
from stillhouse.agents.reply_format import ReplyFormat
from stillhouse.agents.tool_format import ToolCall, ToolFormat
from stillhouse.data.media import MEDIA, MEDIUM
from stillhouse.data.record import RecordError
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.display import first_line
from stillhouse.rollout.turns import EpisodeCalls, Reply, SampleTurns, TurnReplies
from stillhouse.user_code.function_calls import CallLostError
from stillhouse.user_code.functions import UserFunctionError

#: `beginning` first tokenizes _CHARACTERS characters per needed token. It doubles the number of characters until they
#: have more than 2 × (the number of needed tokens) + _MARGIN tokens
_CHARACTERS, _MARGIN = 16, 64
#: the text that is added at the end of a reply that was cut
_CUT = "\n[The rest of this reply was cut.]"
#: the reply if tools have not returned within `rollout.worker_timeout`, or have ended their process
_LOST = f"{ERROR}the tool did not return"


class TextReplies(TurnReplies):
    """The texts of an environment (`rollout.environment`) as replies. A reply can have any tokens except placeholders
    of media.

    prompt: the generation prompt of the chat template, or "".
    warn: called at most once, in any thread, with a warning, if the reply to a complete turn of a conversation does
        not end with the generation prompt.
    """

    def __init__(
        self,
        calls: EpisodeCalls,
        tokenizer: PreTrainedTokenizerBase,
        placeholders: Sequence[int] = (),
        *,
        prompt: str = "",
        warn: Callable[[str], None] | None = None,
    ):
        super().__init__(calls, tokenizer)
        self._placeholders = placeholders
        self._prompt, self._warn = prompt.strip(), warn
        self._special = special_ids(tokenizer)

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        return self._calls.request(sample.arguments, self._episode(sample))

    def reply(self, sample: SampleTurns, future: Future[Any], most: int) -> Reply | None:
        """Return the reply (see `TurnReplies`). Warns if a reply to a complete turn of a conversation does not begin
        a new turn of the student.
        """
        if not (text := future.result()):
            return None
        is_complete = int(sample.turns[-1][-1]) in self._special
        is_after_prompt = bool(self._prompt) and sample.arguments[0].rstrip().endswith(self._prompt)
        if self._warn is not None and is_complete and is_after_prompt and not text.rstrip().endswith(self._prompt):
            warn, self._warn = self._warn, None
            warn(
                f"rollout.environment: the reply {text[:80]!r} follows a complete turn of a conversation without "
                f"the generation prompt {self._prompt!r} of the chat template, so the student continues outside of a "
                "turn: expected rollout.reply=user or rollout.reply=tool, with which the template writes replies as "
                "turns, or replies that contain all text of a turn and the generation prompt"
            )
        try:
            part = beginning(lambda text: tokenize(self._tokenizer, [text], special=False)[0], text, most)
            ids = tokenize(self._tokenizer, [part], special=False)[0]
        except RecordError as error:
            raise ValueError(f"rollout.environment: a reply cannot be read: {error}") from error
        return _text_reply(text, ids, self._placeholders)


class MessageReplies(TurnReplies):
    """The texts of an environment as turns of the chat template (`rollout.reply`).

    A turn that gets a reply ends with the template's end marker, or with a text of `rollout.stop`. If a turn ends
    with another end-of-sequence token, the sample ends.

    has_stops: whether `rollout.stop` has texts.
    """

    def __init__(
        self, calls: EpisodeCalls, reply_format: ReplyFormat, placeholders: Sequence[int] = (), *, has_stops: bool
    ):
        super().__init__(calls, reply_format.tokenizer)
        self._format, self._placeholders, self._has_stops = reply_format, placeholders, has_stops
        self._special = special_ids(reply_format.tokenizer)

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        last = int(sample.turns[-1][-1])
        if last != self._format.marker_id and (not self._has_stops or last in self._special):
            return None
        return self._calls.request(sample.arguments, self._episode(sample))

    def reply(self, sample: SampleTurns, future: Future[Any], most: int) -> Reply | None:
        if not (text := future.result()):
            return None
        ends = int(sample.turns[-1][-1]) != self._format.marker_id
        try:
            ids = self._format.reply_ids(beginning(self._format.text.ids, text, most), ends=ends)
        except ValueError as error:
            raise UserFunctionError(str(error)) from error
        return _text_reply(text, ids, self._placeholders)


class ToolReplies(TurnReplies):
    """The replies of the tools that a turn calls, as the chat template writes them (`rollout.tools`).

    A turn that gets a reply ends with the template's end marker, or with a text of `rollout.stop`. If a turn ends
    with another special token, or has no call, the sample ends.

    most_tokens: the maximum number of tokens of a reply's text. A longer text is cut.
    have_state: whether some tools are methods of objects. If not, a lost call does not raise an error.
    warn: called, in any thread, with a line about lost calls.
    """

    def __init__(
        self,
        calls: EpisodeCalls,
        tool_format: ToolFormat,
        most_tokens: int,
        *,
        have_state: bool,
        warn: Callable[[str], None],
    ):
        super().__init__(calls, tool_format.tokenizer)
        self._format, self._most_tokens = tool_format, most_tokens
        self._have_state, self._warn = have_state, warn
        self._special = special_ids(tool_format.tokenizer)

    def request(self, sample: SampleTurns) -> Future[Any] | None:
        if not self._tool_calls(sample.turns[-1]):
            return None
        return self._calls.request(sample.arguments, self._episode(sample))

    def reply(self, sample: SampleTurns, future: Future[Any], most: int) -> Reply | None:
        calls = self._tool_calls(sample.turns[-1])
        try:
            texts = future.result()
        except CallLostError as error:
            if self._have_state:
                raise
            self._warn(f"the reply of the tools is {_LOST!r}: {first_line(error)}")
            texts = [_LOST] * len(calls)
        ends = int(sample.turns[-1][-1]) != self._format.marker_id
        names, bounded = [call.name for call in calls], [self._bounded(text) for text in texts]
        ids = self._format.reply_ids(names, bounded, ends=ends)
        return Reply(texts, ids, len(texts), sum(text.startswith(ERROR) for text in texts))

    def _turn(self, ids_N: np.ndarray) -> list[tuple[Any, ...]]:
        return [(call.name, call.arguments, call.problem) for call in self._tool_calls(ids_N)]

    def _tool_calls(self, ids_N: np.ndarray) -> list[ToolCall]:
        """The calls that a turn makes. A turn that ends with another special token than the end marker makes none."""
        if ids_N[-1] == self._format.marker_id:
            ids_N = ids_N[:-1]
        elif int(ids_N[-1]) in self._special:
            return []
        return self._format.calls(self._tokenizer.decode(ids_N, clean_up_tokenization_spaces=False))

    def _bounded(self, text: str) -> str:
        """The text if it has at most `most_tokens` tokens; otherwise its beginning and `_CUT`, within this limit."""
        most, count = self._most_tokens, len(beginning(self._format.text.ids, text, self._most_tokens))
        if count == len(text) and len(self._format.text.ids(text)) <= most:
            return text
        kept, too_many = 0, count + 1
        while too_many - kept > 1:
            middle = (kept + too_many) // 2
            if len(self._format.text.ids(text[:middle] + _CUT)) <= most:
                kept = middle
            else:
                too_many = middle
        return text[:kept] + _CUT


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of the special tokens of a tokenizer, such as the tokens that end a turn."""
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def beginning(ids_of: Callable[[str], Sequence[int]], text: str, most: int) -> str:
    """Return a text or, if it is long, a beginning with more than `most` tokens. So a long text need not be tokenized
    completely. ids_of: returns the tokens of a text.
    """
    characters = _CHARACTERS * (most + 1)
    # near its end, the beginning can have other tokens than the full text, so a margin is needed
    while characters < len(text) and len(ids_of(text[:characters])) <= 2 * most + _MARGIN:
        characters *= 2
    return text[:characters]


def _text_reply(text: str, ids: Sequence[int], placeholders: Sequence[int]) -> Reply:
    """The reply of an environment.

    placeholders: the ids of the placeholder tokens of media.

    Raises UserFunctionError for a reply with a placeholder token.
    """
    if not set(placeholders).isdisjoint(ids):
        raise UserFunctionError(
            f"rollout.environment: the reply {text[:80]!r} has the placeholder token of {MEDIUM}: expected text, "
            f"because only prompts have {MEDIA}"
        )
    return Reply(text, ids)
