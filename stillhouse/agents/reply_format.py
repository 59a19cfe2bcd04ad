"""Writes replies after turns of the assistant as a chat template does, and proves for each template that this works.

A reply follows the tokens that the model has generated, and these tokens do not change. So the text that the template
writes after a turn of the assistant must not depend on the messages before this turn. In a reply, added tokens of the
tokenizer are ordinary text, so a reply can neither end its turn nor begin a turn of the student.
"""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import MediaProcessor
from stillhouse.data.read.messages import Message, Tools
from stillhouse.data.record import RecordError
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.templates import ANCHOR, token_at
from stillhouse.data.render.tokenizers import tokenize

ReplyRole = Literal["user", "tool"]
QUESTION: Message = {"role": "user", "content": "Please help."}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "now", "description": "Gives the time.", "parameters": {"type": "object", "properties": {}}},
}
#: examples of replies: a template must write each of them without a change
_REPLIES = (f"Reply{ANCHOR}", '75001 "b" <c>\n{d} [é]', "no")


class OrdinaryText:
    """Tokenizes replies so that added tokens of the tokenizer become ordinary text. key: the configuration key that
    errors name.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str):
        self.tokenizer, self.key = tokenizer, key
        added = {text: index for text, index in tokenizer.get_added_vocab().items() if text.strip()}
        self._added_ids = set(added.values())
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")

    def template_ids(self, text: str) -> list[int]:
        """The tokens of a text that the chat template writes, in which added tokens keep their ids. Raises ValueError
        for a text that `tokenize` refuses.
        """
        try:
            return tokenize(self.tokenizer, [text], special=False)[0] if text else []
        except RecordError as error:
            raise ValueError(f"{self.key}: {error}") from error

    def ids(self, text: str) -> list[int]:
        """The tokens of the text of a reply, without a chat template. Added tokens become ordinary text."""
        ids, end = list[int](), 0
        for match in self._added.finditer(text):
            ids += self.template_ids(text[end : match.start()]) + self._without_token(match[0])
            end = match.end()
        return ids + self.template_ids(text[end:])

    def ids_within(self, write: Callable[[Sequence[str]], str], replies: Sequence[str]) -> list[int]:
        """The tokens of a text of the chat template that contains replies. In the replies, added tokens become
        ordinary text.

        write: gets replies, and returns the text of the template that contains these replies.

        Raises ValueError if a reply would still have an added token.
        """
        salt = f"{ANCHOR}Text"
        while any(salt in reply for reply in replies):
            salt += "x"
        texts: list[str] = []

        def hide(match: re.Match[str]) -> str:
            texts.append(match[0])
            return f"{salt}{len(texts) - 1}z"

        written = write([self._added.sub(hide, reply) for reply in replies])
        ids = list[int]()
        for number, piece in enumerate(re.split(f"{salt}([0-9]+)z", written)):
            ids += self._without_token(texts[int(piece)]) if number % 2 else self.template_ids(piece)
        short_ids = self.template_ids(write(["a"] * len(replies)))
        if self._added_among(ids) != self._added_among(short_ids):
            raise ValueError(
                f"{self.key}: the reply {replies[0][:80]!r} contains special tokens of the tokenizer that cannot be "
                "tokenized as ordinary text"
            )
        return ids

    def _without_token(self, added: str) -> list[int]:
        for pieces in ([added[:1], added[1:]], list(added)):
            ids = [index for piece in pieces for index in self.template_ids(piece)]
            if not self._added_among(ids):
                return ids
        raise ValueError(f"{self.key}: a reply has the token {added!r}, which cannot be tokenized as ordinary text")

    def _added_among(self, ids: Sequence[int]) -> list[int]:
        return [index for index in ids if index in self._added_ids]


class TurnFormat:
    """Writes replies after turns of the assistant: the shared part of `ReplyFormat` and `ToolFormat`.

    processor: see `ChatTemplate`.
    turns: a question, a turn of the assistant with the anchor, and a reply to this turn.
    tools: the tools of the conversation.

    Attributes:
    text: tokenizes the texts of replies.
    marker_id: the special token with which the template ends a turn. If the template writes nothing after the last
        turn (GLM), `marker_id` is the header token with which the reply begins.
    """

    #: for errors: the key of the configuration, the text that the template cannot write, and the expected template
    _key: str
    _what: str
    _expected: str

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None, turns: list[Message], tools: Tools
    ):
        self.tokenizer, self.text = tokenizer, OrdinaryText(tokenizer, self._key)
        self._template = ChatTemplate(tokenizer, ("messages",), "none", processor)
        self._lock = threading.Lock()
        self._before, self._prompted = (self._written([QUESTION], tools, prompt=prompt) for prompt in (False, True))
        #: the generation prompt
        self.prompt = self._prompted.removeprefix(self._before)
        self._last_turn = self._written(turns[:2], tools)
        _, anchor, tail = self._last_turn.partition(ANCHOR)
        tail = tail.rstrip()
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        marker = max((text for text in special if tail.endswith(text)), key=len, default="")
        if anchor and not marker:
            replied = self._written(turns, tools, prompt=True).partition(ANCHOR)[2]
            marker = token_at(replied, special, len(tail)) if replied.startswith(tail) else ""
            tail += marker
        self.marker, self._tail = marker, tail
        self.marker_id: int = self.tokenizer.convert_tokens_to_ids(marker)

    def _prove_ids(self, messages: list[Message], tools: Tools, ids: list[int]) -> None:
        """Raise ValueError unless a conversation ends with the generation prompt and its `_suffix` has these ids."""
        complete, suffix = self._written(messages, tools, prompt=True), self._suffix(messages, tools)
        if not suffix.endswith(self.prompt):
            raise self._error(
                f"ends with {suffix[-80:]!r} after a reply, and not with its generation prompt {self.prompt!r}"
            )
        head = complete.removesuffix(suffix)
        if self.text.template_ids(complete) != self.text.template_ids(head) + ids:
            raise self._error("writes replies whose first token also contains characters of the previous turn")

    def _suffix(self, messages: list[Message], tools: Tools = None) -> str:
        """The text that the template writes between the turn with the anchor and the next turn."""
        _, anchor, behind = self._written(messages, tools, prompt=True).partition(ANCHOR)
        if not anchor or not behind.startswith(self._tail):
            raise self._error(f"ends a turn with {self._tail!r}, but with {behind[:60]!r} if a reply follows")
        return behind.removeprefix(self._tail)

    def _written(self, messages: list[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        try:
            with self._lock:
                return self._template.text(messages, tools, prompt=prompt)
        except RecordError as error:
            raise self._error(f"cannot write {self._what}: {error}") from error

    def _error(self, problem: str) -> ValueError:
        return ValueError(
            f"the chat template of {self.tokenizer.name_or_path!r} {problem}: expected {self._expected}"
        )


class ReplyFormat(TurnFormat):
    """Writes replies of the role `user` or `tool` after turns of the assistant.

    processor: see `ChatTemplate`.

    Raises ValueError unless the following is proven. After a turn of the assistant, the template writes its end
    marker, and then a text that contains the unchanged reply and ends with the generation prompt. This text is the
    same after one turn and after several, with and without a system message, and with and without tools, if the
    template accepts such conversations. The tokens of the text are the same as in the whole conversation.
    """

    _key = "rollout.environment"
    _expected = (
        "a data.chat_template that writes replies as turns, or rollout.reply=raw with replies that contain all text "
        "of a turn"
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, role: ReplyRole, processor: MediaProcessor | None = None):
        self._role, self._what = role, f"a reply of the role {role}"
        super().__init__(tokenizer, processor, self._turns("a"), None)
        if not self.marker or self._tail.strip() != self.marker:
            problem = f"does not end a turn of the assistant with a special token, but with {self._last_turn[-60:]!r}"
            written = self._written(self._turns(_REPLIES[0]))
            if ANCHOR in self._last_turn and _REPLIES[0] not in written:
                problem = f"does not write a message of the role {role} with its content: {written[-200:]!r}"
            raise self._error(problem)
        frames = set()
        for reply_text in _REPLIES:
            head, is_written, tail = self._suffix(self._turns(reply_text)).partition(reply_text)
            if not is_written:
                raise self._error(f"does not write a message of the role {role} with its content: {head!r:.200}")
            frames.add((head, tail))
        if len(frames) > 1:
            raise self._error(f"writes messages of the role {role} in different ways: {sorted(frames)!r:.200}")
        self._prove_ids(self._turns(_REPLIES[1]), None, self.reply_ids(_REPLIES[1]))
        plain_suffix = self._suffix(self._turns("a"))
        replied: list[Message] = [QUESTION, {"role": "assistant", "content": "b"}, {"role": role, "content": "c"}]
        histories: list[tuple[str, list[Message], Tools]] = [
            ("a system message", [_SYSTEM, QUESTION], None),
            ("tools", [QUESTION], [_TOOL]),
            ("another reply", replied, None),
        ]
        for name, history, tools in histories:
            try:
                self._template.text(history, tools, prompt=True)
            except RecordError:
                continue  # the template does not accept such prompts
            if (suffix := self._suffix([*history, *self._turns("a")[1:]], tools)) != plain_suffix:
                raise self._error(
                    f"writes a reply as {suffix!r:.200} after {name}, and as {plain_suffix!r:.200} otherwise"
                )

    def reply_ids(self, reply: str, *, ends: bool = False) -> list[int]:
        """The tokens between the end of a turn of the assistant and its next turn. Added tokens of the tokenizer in
        the reply become ordinary text.

        ends: whether the tokens begin with the turn's end marker, because the model has not generated the marker.
        """
        ids = self.text.ids_within(lambda replies: self._suffix(self._turns(replies[0])), [reply])
        return [self.marker_id, *ids] if ends else ids

    def _turns(self, reply: str) -> list[Message]:
        return [QUESTION, {"role": "assistant", "content": ANCHOR}, {"role": self._role, "content": reply}]


def generation_prompt(tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None = None) -> str:
    """The generation prompt that the chat template writes after a question, or "" if it writes none."""
    if not tokenizer.chat_template or not tokenizer.is_fast:
        return ""
    try:
        template = ChatTemplate(tokenizer, ("messages",), "none", processor)
        before, prompted = (template.text([QUESTION], None, prompt=prompt) for prompt in (False, True))
    except ValueError:
        return ""  # a run with strings as prompts does not use the template
    return prompted.removeprefix(before) if prompted.startswith(before) else ""
