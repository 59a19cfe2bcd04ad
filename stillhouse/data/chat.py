"""Where the assistant's turns lie in a conversation that a chat template rendered without saying so.

The text that a template writes for the first n messages (and the generation prompt behind them) is, with
most templates, a prefix of what it writes for the whole conversation: its length is a turn's edge. Templates
of reasoning models break this, because they drop the thoughts of all turns but the last. There the text is
compared only from the end of message n's content on, which an anchor, appended to the content in both
renderings, marks: what follows it in the beginning, rendered alone, must begin what follows it in the whole,
and without the anchor both texts must still end like this. So a turn's edge is never searched for, and what
a user wrote cannot be mistaken for it.

Two deviations are understood, both of turns before the last message only: a generation prompt that opens
the thoughts, which an earlier turn no longer has, and an end that the last turn has and an earlier one not.
Everything else is a TurnError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
Message = dict[str, Any]

ANCHOR = "StillhouseAnchor8f3a"  # templates leave it as it is: no white space, no tags, nothing to escape


class TurnError(ValueError):
    """The template does not let the assistant's part be told apart."""


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one conversation.

    `text(messages, prompt)` renders, with the generation prompt behind if `prompt`; `body` is the whole
    conversation rendered; `special` are the tokenizer's added tokens.
    """

    text: Callable[[list[Message], bool], str]
    messages: list[Message]
    body: str
    special: tuple[str, ...]

    def spans(self, first: int) -> list[Span]:
        """The characters the assistant generates, one range a turn, in the messages from `first` on.

        What the template writes between a generation prompt and the content (an empty thinking block) is
        within, and so is the marker that ends the turn, but not the white space after it.
        """
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] == "assistant" and index >= first:
                start = self.edge(index, prompt=True)
                stop = self.edge(index + 1, prompt=False)
                if not (spans[-1][1] if spans else 0) <= start <= stop:
                    raise self._error(index + 1, prompt=False)
                spans.append((start, self._end_of_turn(start, stop)))
        return spans

    def edge(self, count: int, *, prompt: bool) -> int:
        """Where in the body the first `count` messages (and the generation prompt) end."""
        if not count:
            raise self._error(count, prompt)
        beginning = self.text(self.messages[:count], prompt)
        if self.body.startswith(beginning):
            return len(beginning)
        alone, whole = self._behind_anchor(count, prompt)
        if whole and beginning.endswith(alone) and self.body.endswith(whole):
            common = self._common(count, alone, whole, prompt)
            if common is not None:
                return len(self.body) - len(whole) + common
        raise self._error(count, prompt)

    def _behind_anchor(self, count: int, prompt: bool) -> tuple[str, str]:
        """What follows the content of message `count` in the beginning alone and in the whole; "" if lost."""
        anchored = self._anchored(count)
        alone = _behind(self.text(anchored, prompt))
        whole = _behind(self.text(anchored + self.messages[count:], False))
        if alone is None or whole is None:
            return "", ""
        if not self.messages[count - 1].get("content", "").strip():
            # Before a tool call a template puts white space only behind content that is there.
            return alone.lstrip(), whole.lstrip()
        return alone, whole

    def _common(self, count: int, alone: str, whole: str, prompt: bool) -> int | None:
        """How much of `whole`, the text behind the anchor, belongs to the first `count` messages."""
        if whole.startswith(alone):
            return len(alone)
        if count + prompt >= len(self.messages):
            return None
        known = self._heading(count) if prompt else self._end_marker(count, alone)
        return len(known) if known and alone.startswith(known) and whole.startswith(known) else None

    def _heading(self, count: int) -> str:
        """What lies between the content of message `count` and that of the turn behind it."""
        turn = self.messages[count] | {"content": ANCHOR}
        text = _behind(self.text([*self._anchored(count), turn, *self.messages[count + 1 :]], False))
        return (text or "").partition(ANCHOR)[0]

    def _end_marker(self, count: int, alone: str) -> str:
        """The special token right behind the content: with no message behind it, it can only end the turn."""
        if self.messages[count - 1].get("tool_calls"):
            return ""
        return max((token for token in self.special if alone.startswith(token)), key=len, default="")

    def _anchored(self, count: int) -> list[Message]:
        last = self.messages[count - 1]
        return [*self.messages[: count - 1], last | {"content": last.get("content", "") + ANCHOR}]

    def _end_of_turn(self, start: int, stop: int) -> int:
        """Without the white space after the marker that ends the turn: nobody generates it."""
        turn = self.body[start:stop].rstrip()
        return start + len(turn) if turn.endswith(self.special) else stop

    def _error(self, count: int, prompt: bool) -> TurnError:
        return TurnError(
            "the assistant's tokens cannot be told apart: the chat template renders the first "
            f"{count} messages{' and the generation prompt' if prompt else ''} differently alone and "
            "within the whole conversation (reasoning templates rewrite earlier turns); give the last turn "
            "alone as 'prompt' and 'completion' (lists of messages), or use a chat template with "
            "{% generation %} blocks"
        )


def _behind(text: str) -> str | None:
    """What follows the anchor; None if the template has dropped it."""
    _, anchor, behind = text.partition(ANCHOR)
    return behind if anchor else None
