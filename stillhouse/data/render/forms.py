"""The forms of records. The first record of a dataset decides the form of all its records.

    text                    plain documents; every token is a target
    prompt + completion     two strings, or two lists of messages; the completion is the target
    messages                a conversation; the assistant's turns are the target

Where a model generates the completions, only the part of a record before the completion is read: `prompt` (a string,
or a list of messages), or `messages` without the assistant's turns at their end.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.data.render.chat_template import ChatPromptTemplate, ChatTemplate
from stillhouse.data.render.templates import CompletionTemplate, PromptTemplate, Template, TextTemplate, Tokens
from stillhouse.display import name_list

EXPECTED_COLUMNS = "'messages', 'prompt' and 'completion', or 'text'"  # `columns.py` adds those of other projects


def template_for(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> Template:
    """The template for a dataset whose first record has these columns.

    Raises ValueError if the columns match none or several of the three forms, or if the tokenizer lacks what the form
    needs: an end-of-sequence token, a chat template, character offsets.
    """
    complete = [form for form in (("messages",), ("prompt", "completion"), ("text",)) if set(form) <= set(fields)]
    names = name_list(fields)
    if not complete and "prompt" in fields:
        only = "only a run whose student writes all completions needs none (section rollout, with share=1)"
        raise ValueError(f"prompts without completions: found {names}; expected a column 'completion'; {only}")
    if not complete:
        raise ValueError(f"no usable columns: found {names}; expected {EXPECTED_COLUMNS} (or ShareGPT's or Alpaca's)")
    if len(complete) > 1:
        raise ValueError(f"ambiguous columns: found {names}; expected only one of {EXPECTED_COLUMNS}")
    columns = complete[0]
    if columns == ("text",):
        return TextTemplate(tokenizer)
    if columns == ("messages",) or isinstance(fields["prompt"], list):
        return ChatTemplate(tokenizer, columns, tokens)
    return CompletionTemplate(tokenizer, tokens)


def prompt_template_for(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Template:
    """The template for a dataset of prompts whose first record has these columns.

    Raises ValueError if there is no prompt in them, or if the tokenizer has no chat template and needs one.
    """
    forms = [form for form in ("messages", "prompt") if form in fields]
    if len(forms) != 1:
        kind = "ambiguous" if forms else "no usable"
        raise ValueError(
            f"{kind} columns: found {name_list(fields)}; expected one of 'prompt' or 'messages' to write after"
        )
    if forms == ["messages"]:
        return ChatPromptTemplate(tokenizer, ("messages",))
    # the columns decide a record's content key, which must be that of the same record as a whole document
    columns = tuple(name for name in ("prompt", "completion") if name in fields)
    kind_of_template = ChatPromptTemplate if isinstance(fields["prompt"], list) else PromptTemplate
    return kind_of_template(tokenizer, columns)
