"""Turns a record into the tokens after which a model writes: the prompt, without a completion.

    prompt          a string, or a list of messages; a completion beside it is not read
    messages        a conversation; the assistant's turns at its end are not read

A chat ends with the beginning of the assistant's next turn, as the chat template writes it for generation.
"""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.data.read.messages import messages_of
from stillhouse.data.record import RecordError, column_value, describe, string_value
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.templates import CompletionTemplate, Encoded, Rendered, with_targets


class PromptTemplate(CompletionTemplate):
    """Prompts as strings, tokenized as those of `CompletionTemplate`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]):
        super().__init__(tokenizer, "completion")
        self.columns = columns

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        return Rendered("", prompt=string_value(fields, "prompt", may_be_empty=True))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        return [with_targets(ids, []) for ids in self.encode_prompts([record.prompt for record in rendered])]


class ChatPromptTemplate(ChatTemplate):
    """Conversations up to the assistant's turn that is to be written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]):
        super().__init__(tokenizer, columns, "completion", prompts=True)

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        column = self.columns[0]
        messages = messages_of(fields, column)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise RecordError(f"'{column}' has only turns of the assistant, got {describe(fields[column])}")
        return self.conversation(fields, messages, 0)
