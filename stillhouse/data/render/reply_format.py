"""How a chat template writes a reply of an environment as a turn of its own. It is proven for the template.

A reply follows the tokens that the model has generated, which stay as they are. So the template must write the same
text behind a turn of the assistant, whatever came before this turn.
"""

import threading
from collections.abc import Collection, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import MediaProcessor
from stillhouse.data.read.messages import Message, Tools
from stillhouse.data.record import RecordError
from stillhouse.data.render.assistant_turns import ANCHOR
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.ordinary_text import OrdinaryText

_QUESTION: Message = {"role": "user", "content": "Please help."}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "Gives the time.", "parameters": {"type": "object", "properties": {}}},
}
#: replies that a template might change
_REPLIES = (f"Reply{ANCHOR}", '75001 "b" <c>\n{d} [é]', "no")


class ReplyFormat:
    """Writes replies of the role `user` or `tool` behind turns of the assistant.

    marker_id: the special token with which the template ends a turn of the assistant. If it writes nothing behind the
        last turn (GLM), this is the header with which it begins the reply.

    Raises ValueError unless this is proven: behind a turn of the assistant, the template writes its end marker, and
    then a text with the unchanged reply that ends with the generation prompt. This text is the same behind one turn
    and behind several, with and without a system message, and with and without tools, where the template accepts
    them. Its tokens are those of the whole conversation.
    """

    def __init__(self, template: ChatTemplate, role: Literal["user", "tool"]):
        self.tokenizer = template.tokenizer
        self._template, self._role, self._lock = template, role, threading.Lock()
        self._text = OrdinaryText(self.tokenizer, "rollout.environment")
        self._end, self.marker = self._end_of_turn()
        self.marker_id: int = self.tokenizer.convert_tokens_to_ids(self.marker)
        self._prove_text()
        self._prove_histories()
        reply = _REPLIES[1]
        complete = self._conversation([_QUESTION], reply)
        head = complete.removesuffix(self._suffix([_QUESTION], reply))
        if self._text.template_ids(complete) != self._text.template_ids(head) + self.reply_ids(reply):
            raise self._error("writes replies of which the first token also has characters of the turn before")

    def reply_ids(self, reply: str, *, ends: bool = False) -> list[int]:
        """The tokens between the end of a turn and the beginning of the next turn.

        reply: a text. Added tokens of the tokenizer in it become ordinary text.
        ends: whether the end marker of the turn comes first, because the model has not generated it.
        """
        ids = self._text.ids_within(lambda replies: self._suffix([_QUESTION], replies[0]), [reply])
        return [self.marker_id, *ids] if ends else ids

    def text_ids(self, reply: str) -> list[int]:
        """The tokens of a reply by itself, in which added tokens of the tokenizer are ordinary text."""
        return self._text.ids(reply)

    def _end_of_turn(self) -> tuple[str, str]:
        """What the template writes behind the content of the last turn of the assistant, and the token in it."""
        written = self._written([_QUESTION, _answer(ANCHOR)])
        behind = written.rpartition(ANCHOR)[2].rstrip()
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        if ANCHOR in written and not behind:
            behind = first_special(self._conversation([_QUESTION], "a").partition(ANCHOR)[2], special)
        if ANCHOR not in written or behind.strip() not in special:
            raise self._error(
                f"does not end a turn of the assistant with a special token, but with {written[-60:]!r}"
            )
        return behind, behind.strip()

    def _prove_text(self) -> None:
        before, prompted = (self._written([_QUESTION], prompt=prompt) for prompt in (False, True))
        prompt = prompted.removeprefix(before) if prompted.startswith(before) else prompted
        frames = set()
        for reply in _REPLIES:
            head, is_written, tail = self._suffix([_QUESTION], reply).partition(reply)
            if not is_written:
                raise self._error(
                    f"does not write a message of the role {self._role} with its content: {head!r:.200}"
                )
            frames.add((head, tail))
        if len(frames) > 1:
            raise self._error(f"writes messages of the role {self._role} in different ways: {sorted(frames)!r:.200}")
        if not tail.endswith(prompt):
            raise self._error(
                f"ends with {tail[-80:]!r} after a reply, and not with its generation prompt {prompt!r}"
            )

    def _prove_histories(self) -> None:
        expected = self._suffix([_QUESTION], "a")
        histories: list[tuple[str, list[Message], Tools]] = [
            ("a system message", [_SYSTEM, _QUESTION], None),
            ("tools", [_QUESTION], [_TOOL]),
            ("another reply", [_QUESTION, _answer("b"), self._reply("c")], None),
        ]
        for name, history, tools in histories:
            try:
                self._template_text(history, tools, prompt=True)
            except RecordError:
                continue  # the template refuses such prompts
            if (suffix := self._suffix(history, "a", tools)) != expected:
                raise self._error(f"writes a reply as {suffix!r:.200} after {name}, and as {expected!r:.200} without")

    def _suffix(self, history: Sequence[Message], reply: str, tools: Tools = None) -> str:
        """What the template writes between the end of a turn behind these messages and the next turn."""
        _, anchor, behind = self._conversation(history, reply, tools).partition(ANCHOR)
        if not anchor or not behind.startswith(self._end):
            raise self._error(f"ends a turn with {self._end!r}, and with {behind[:60]!r} if a reply follows")
        return behind.removeprefix(self._end)

    def _conversation(self, history: Sequence[Message], reply: str, tools: Tools = None) -> str:
        return self._written([*history, _answer(ANCHOR), self._reply(reply)], tools, prompt=True)

    def _reply(self, text: str) -> Message:
        return {"role": self._role, "content": text}

    def _written(self, messages: list[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        try:
            return self._template_text(messages, tools, prompt=prompt)
        except RecordError as error:
            raise self._error(f"cannot write a reply of the role {self._role}: {error}") from error

    def _template_text(self, messages: list[Message], tools: Tools, *, prompt: bool) -> str:
        with self._lock:
            return self._template.text(messages, tools, prompt=prompt)

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"the chat template of {self.tokenizer.name_or_path!r} {problem}: expected one that writes replies as "
            "turns (data.chat_template), or rollout.reply=raw with replies that have all text of a turn"
        )


def reply_format(
    tokenizer: PreTrainedTokenizerBase, role: Literal["user", "tool"], processor: MediaProcessor | None = None
) -> ReplyFormat:
    """The proven format of a tokenizer's chat template; see `ReplyFormat`. processor: see `ChatTemplate`."""
    return ReplyFormat(ChatTemplate(tokenizer, ("messages",), "none", processor), role)


def generation_prompt(tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None = None) -> str:
    """What the chat template writes behind a question for the next turn; "" if nothing, or without a template."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return ""
    try:
        template = ChatTemplate(tokenizer, ("messages",), "none", processor)
        before, prompted = (template.text([_QUESTION], None, prompt=prompt) for prompt in (False, True))
    except ValueError:
        return ""  # a run whose prompts are strings does not use its template
    return prompted.removeprefix(before) if prompted.startswith(before) else ""


def first_special(text: str, special: Collection[str]) -> str:
    """The special token with which a text begins; "" if it begins with another text."""
    return max((token for token in special if text.startswith(token)), key=len, default="")


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}
