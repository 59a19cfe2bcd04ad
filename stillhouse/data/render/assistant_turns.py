"""Finds the assistant's turns in a conversation that a chat template rendered without marking them.

With most templates, the text of the first n messages (and the generation prompt after them) is a prefix of the text
of the whole conversation. The length of this prefix is then the edge of a turn.

Templates of reasoning models drop the thoughts of all turns except the last. For them, an anchor (a unique text) is
appended to the content of message n. Then the first n messages are rendered, and the whole conversation. Their texts
after the anchor are compared: the text from the first n messages must be a prefix of the text from the whole
conversation. Without the anchor, the two renderings must still end with these texts. So an edge is never searched in
the conversation, and no text of a user can be mistaken for an edge.

Some templates end a turn with nothing but the header of the next turn (GLM: `<|user|>`, `<|observation|>`). If this
header begins with an end-of-sequence token of the model, the token belongs to the turn that it ends.

Two deviations are supported in turns before the last message. The generation prompt may open the thoughts of a turn
that has no thoughts in the whole conversation. The template may write a text after the end marker only in the last
turn. Every other deviation raises ValueError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stillhouse.data.read.messages import Message, text_of, with_text_appended

Span = tuple[int, int]

#: templates do not change this text: it has no white space, no tags and no characters to escape
ANCHOR = "StillhouseAnchor8f3a"


@dataclass(frozen=True)
class Turns:
    """Finds the assistant's turns in one conversation.

    text: renders messages. If its argument `prompt` is true, the generation prompt follows the messages.
    body: the whole conversation as text.
    special: the tokenizer's added tokens. ends: those of them that are end-of-sequence tokens of the model.
    """

    text: Callable[[list[Message], bool], str]
    messages: list[Message]
    body: str
    special: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def spans(self, first: int) -> list[Span]:
        """The characters that the assistant generates, as one range per turn, in the messages from `first` on.

        A range includes the template's text between the generation prompt and the content (such as an empty thinking
        block). It also includes the end marker of the turn, but not the white space after the marker. A turn without
        a marker includes the end-of-sequence token with which the next turn begins.
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
        """The position in the body where the first `count` messages (and the generation prompt) end."""
        if not count:
            raise ValueError(
                "the conversation begins with a turn of the assistant: a chat template writes no generation prompt "
                "without a message before it, so the tokens that the assistant generates cannot be identified; "
                "expected a turn of the user or system first, this turn in 'prompt' and the turns to learn in "
                "'completion' (lists of messages), or a chat template with {% generation %} blocks"
            )
        if count == len(self.messages) and not prompt:
            return len(self.body)
        beginning = self.text(self.messages[:count], prompt)
        if self.body.startswith(beginning):
            return len(beginning)
        shortened, complete = self._behind_anchor(count, prompt)
        if complete and beginning.endswith(shortened) and self.body.endswith(complete):
            common = self._common(count, shortened, complete, prompt)
            if common is not None:
                return len(self.body) - len(complete) + common
        raise self._error(count, prompt)

    def _behind_anchor(self, count: int, prompt: bool) -> tuple[str, str]:
        """Two texts after the content of message number `count` (from 1): from the rendering of the first `count`
        messages, and from that of the whole conversation. Both are "" if the template drops the anchor.
        """
        anchored = self._anchored(count)
        shortened = _behind(self.text(anchored, prompt))
        complete = _behind(self.text(anchored + self.messages[count:], False))
        if shortened is None or complete is None:
            return "", ""
        if not text_of(self.messages[count - 1]).strip():
            # Before a tool call, templates write white space only if the content is not empty.
            return shortened.lstrip(), complete.lstrip()
        return shortened, complete

    def _common(self, count: int, shortened: str, complete: str, prompt: bool) -> int | None:
        """How many characters of `complete` belong to the first `count` messages; None if it cannot be determined."""
        if complete.startswith(shortened):
            return len(shortened)
        if count + prompt >= len(self.messages):
            return None
        common = self._heading(count) if prompt else self._end_marker(count, shortened)
        return len(common) if common and shortened.startswith(common) and complete.startswith(common) else None

    def _heading(self, count: int) -> str:
        """The text between the content of message number `count` (from 1) and the content of the next message."""
        empty: str | list[Any] = [] if isinstance(self.messages[count].get("content"), list) else ""
        turn = with_text_appended(self.messages[count] | {"content": empty}, ANCHOR)
        text = _behind(self.text([*self._anchored(count), turn, *self.messages[count + 1 :]], False))
        return (text or "").partition(ANCHOR)[0]

    def _end_marker(self, count: int, shortened: str) -> str:
        """The special token directly after the content; "" if there is none, or if the message has tool calls.

        This token must end the turn, because message number `count` is the last message in `shortened`.
        """
        if self.messages[count - 1].get("tool_calls"):
            return ""
        return max((token for token in self.special if shortened.startswith(token)), key=len, default="")

    def _anchored(self, count: int) -> list[Message]:
        return [*self.messages[: count - 1], with_text_appended(self.messages[count - 1], ANCHOR)]

    def closing_header(self) -> str:
        """The end-of-sequence token with which the template would begin a turn behind the last message, which is the
        assistant's. It is "" if the turn has an end marker, or if the next turn does not begin with such a token.
        """
        if not self.ends or self.body.rstrip().endswith(self.ends):
            return ""
        anchored = self._anchored(len(self.messages))
        try:
            behind = _behind(self.text(anchored, False))
            longer = _behind(self.text([*anchored, _next_turn(self.messages[-1])], False))
        except ValueError:
            return ""  # the template refuses a turn behind this one
        if behind is None or longer is None or not longer.startswith(behind):
            return ""
        return self._end_at(longer, len(behind))

    def _end_of_turn(self, start: int, stop: int) -> int:
        """The end of the turn without white space after the end marker, which the assistant does not generate."""
        turn = self.body[start:stop].rstrip()
        if not turn.endswith(self.ends) and (end := self._end_at(self.body, stop)):
            return stop + len(end)
        return start + len(turn) if turn.endswith(self.special) else stop

    def _end_at(self, text: str, start: int) -> str:
        """The end-of-sequence token at this position of a text; "" if there is none."""
        return max((token for token in self.ends if text.startswith(token, start)), key=len, default="")

    def _error(self, count: int, prompt: bool) -> ValueError:
        what = "the assistant's tokens cannot be identified: the chat template"
        is_last = count + prompt == len(self.messages)
        if prompt and is_last and self.body.startswith(before := self.text(self.messages[:count], False)):
            expected = self.text(self.messages[:count], True).removeprefix(before)
            written = self.body[len(before) : len(before) + len(expected) + 20]
            return ValueError(
                f"{what} ends a prompt with {expected[-80:]!r}, but begins message {count + 1} with "
                f"{written[:100]!r}: expected a message with thoughts ('reasoning_content') if the generation prompt "
                "opens them, and without if it closes them, a template with another generation prompt "
                "(data.chat_template: if it reads enable_thinking, a copy of it with {%- set enable_thinking = false "
                "%}, or true, as its first line), or one with {% generation %} blocks"
            )
        only = "" if is_last else "give only the last turn, as 'prompt' and 'completion' (lists of messages), or "
        return ValueError(
            f"{what} renders the first {count} messages{' and the generation prompt' if prompt else ''} by "
            "themselves differently from the same messages within the whole conversation (reasoning templates "
            f"rewrite earlier turns); {only}use a chat template with {{% generation %}} blocks"
        )


def _next_turn(message: Message) -> Message:
    """A message that may follow this turn of the assistant: the reply of a tool, or a question."""
    if not (calls := message.get("tool_calls")):
        return {"role": "user", "content": "a"}
    call = calls[0] if isinstance(calls[0], dict) else {}
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    return {"role": "tool", "content": "a", "name": name or "a", "tool_call_id": call.get("id") or "000000000"}


def _behind(text: str) -> str | None:
    """The text after the anchor; None if the template has dropped the anchor."""
    _, anchor, behind = text.partition(ANCHOR)
    return behind if anchor else None
