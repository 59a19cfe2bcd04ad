"""Turns a record into the tokens after which a model writes: the prompt, without a completion.

    prompt          a string, or a list of messages; a completion beside it is not read
    messages        a conversation; the assistant's turns at its end are not read

A chat ends with the beginning of the assistant's next turn, as the chat template writes it for generation.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.reading import describe
from stillhouse.data.templates import (
    ChatTemplate,
    CompletionTemplate,
    Encoded,
    RecordError,
    Rendered,
    Template,
    column_value,
    prompt_text,
    tokenize,
)
from stillhouse.display import name_list

EXPECTED = "'prompt' or 'messages'"


def prompt_template_for(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template for a dataset of prompts whose first record has these columns.

    Raises ValueError if there is no prompt in them, or if the tokenizer has no chat template and needs one.
    """
    found = [form for form in ("messages", "prompt") if form in fields]
    if len(found) != 1:
        kind = "ambiguous" if found else "no usable"
        raise ValueError(f"{kind} columns: found {name_list(fields)}; expected one of {EXPECTED} to write after")
    # the columns decide a record's content key, which must be that of the same record as a whole document
    columns = (
        tuple(name for name in (*found, "completion") if name in fields) if found == ["prompt"] else ("messages",)
    )
    if found == ["messages"] or isinstance(fields["prompt"], list):
        return ChatPromptTemplate(tokenizer, columns)
    return PromptTemplate(tokenizer, columns)


class PromptTemplate(CompletionTemplate):
    """Prompts as strings, tokenized as those of `CompletionTemplate`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]):
        super().__init__(tokenizer, "completion")
        self.columns = columns

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        return Rendered("", prompt=prompt_text(fields))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        return [_prompt(ids) for ids in self.encode_prompts([each.prompt for each in rendered])]


class ChatPromptTemplate(ChatTemplate):
    """Conversations up to the assistant's turn that is to be written."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...]):
        super().__init__(tokenizer, columns, "completion", prompts=True)

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        column = self.columns[0]
        messages = self.messages(fields, column)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise RecordError(f"'{column}' has only turns of the assistant, got {describe(fields[column])}")
        return Rendered(self.conversation(fields, messages, 0)[0])

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        return [_prompt(ids) for ids in tokenize(self.tokenizer, [each.body for each in rendered], special=False)]


def _prompt(ids: list[int]) -> Encoded:
    return Encoded(np.asarray(ids, dtype=np.int32), np.zeros(len(ids), dtype=bool))
