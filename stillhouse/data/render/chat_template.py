"""Turns the messages of a record into token ids and a mask of the tokens to predict.

The tokenizer's chat template writes all text around the messages. The end marker of a turn is a target, but not the
white space after it. Spans of targets are ranges of characters of the rendered text. A token that overlaps a span is
a target. A record may have a column `tools` with the functions that the assistant may call. The template adds them to
the text.
"""

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.read.messages import Message, Tools, messages_of, require_targets, tools_of
from stillhouse.data.record import (
    RecordError,
    TemplateLimitError,
    column_value,
    describe,
    require_encodable,
    require_length,
)
from stillhouse.data.render.assistant_turns import Span
from stillhouse.data.render.conversations import Conversations
from stillhouse.data.render.isolated_process import Isolated, LimitError
from stillhouse.data.render.templates import BosFrom, Encoded, Rendered, Targets, Template

#: limits of processor time and memory for rendering one conversation
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10.0, 2**30


class ChatTemplate(Template):
    """Conversations, rendered by the tokenizer's chat template, which writes all special tokens itself.

    The template's own `{% generation %}` blocks mark the assistant's characters. Without such blocks, `Turns` finds
    these characters. In records with prompt and completion, only the assistant's turns in the completion are targets.
    A prefix is a system turn. Without targets, the assistant's turns at the end of the conversation are dropped, and
    the generation prompt follows.
    """

    extras: tuple[str, ...] = ("tools",)
    bos_from: BosFrom = "chat template"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...], targets: Targets):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the data holds messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; give 'text' or 'prompt' and 'completion' as strings, or set data.chat_template"
            )
        if not tokenizer.is_fast:
            raise ValueError(f"chats need a fast tokenizer (character offsets), got {type(tokenizer).__name__}")
        tokenizer.get_chat_template()  # raises if there are several templates and no default
        self.tokenizer, self.columns, self.targets = tokenizer, columns, targets
        # A method of this object would make a reference cycle, which would keep this object and its process alive.
        answer = Conversations(tokenizer, targets).answer
        self.render_isolated = Isolated(answer, seconds=TEMPLATE_SECONDS, memory_bytes=TEMPLATE_BYTES)

    def render(self, fields: dict[str, Any]) -> Rendered:
        if self.targets == "none":
            messages, first = self._prompt(fields), 0
        else:
            by_column = [messages_of(fields, column) for column in self.columns]
            require_targets(by_column[-1], self.columns[-1])
            messages = [message for of_column in by_column for message in of_column]
            first = len(messages) - len(by_column[-1])  # the first message that may be a target
        tools = tools_of(fields)
        require_length(sum(len(message.get("content", "")) for message in messages), " and ".join(self.columns))
        rendered = self._rendered(messages, tools, first)
        require_encodable(rendered.body, f"'{self.columns[0]}'")
        return rendered

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        batch = self.tokenizer(
            [record.body for record in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            _with_targets(ids, offsets, record.spans)
            for ids, offsets, record in zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
        ]

    def render_prefix(self, text: str) -> str:
        body = self._rendered([{"role": "system", "content": text}], None, None).body
        # Some templates write the system turn into the user's turn, and drop it without a user's turn.
        if "".join(text.split()) not in "".join(body.split()):
            raise RecordError(
                f"the chat template writes a system turn with this text alone as {shorten(body, 80)!r}, without "
                "the text: expected a template that writes it (data.chat_template), or records with strings"
            )
        return body

    def _prompt(self, fields: dict[str, Any]) -> list[Message]:
        for column in self.columns:
            column_value(fields, column)
        column = self.columns[0]
        messages = messages_of(fields, column)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise RecordError(f"'{column}' has only turns of the assistant, got {describe(fields[column])}")
        return messages

    def _rendered(self, messages: list[Message], tools: Tools, first: int | None) -> Rendered:
        try:
            body, spans, problem = self.render_isolated(messages, tools, first)
        except LimitError as error:
            raise TemplateLimitError(f"the chat template of {self.tokenizer.name_or_path!r}: {error}") from error
        if problem:
            raise RecordError(problem)
        return Rendered(body, spans=tuple((begin, end) for begin, end in spans))


def _with_targets(ids: list[int], offsets: list[Span], spans: tuple[Span, ...]) -> Encoded:
    begins_T, ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    targets_T = np.zeros(len(ids), dtype=bool)
    joined = 0
    for begin, end in spans:
        targets_T |= (begins_T < end) & (ends_T > begin)
        joined += bool(((begins_T < begin) & (ends_T > begin)).any())
    targets_T[:1] = False
    return Encoded(np.asarray(ids, dtype=np.int32), targets_T, joined)
