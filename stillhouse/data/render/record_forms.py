"""The forms of records. All records of a dataset must have the form of its first record.

    text                    plain documents; every token is a target
    prompt + completion     two strings, or two lists of messages; the completion is the target
    messages                a conversation; the assistant's turns are the target

In runs where a model generates the completions, only the prompt of a record is read: `prompt` (a string, or a list of
messages), or `messages` without the assistant's turns at the end.
"""

from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import MediaProcessor
from stillhouse.data.read.foreign_columns import foreign_columns, form_of, own_forms
from stillhouse.data.read.messages import Tools
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.templates import StringTemplate, Targets, Template


def template_for(
    fields: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    targets: Targets,
    processor: MediaProcessor | None = None,
    tools: Tools = None,
    end_ids: Collection[int] = (),
) -> Template:
    """The template for a dataset whose first record has these columns. processor: the student's processor of media.
    end_ids: the student's end-of-sequence ids. tools: the tools of the run; only conversations can have tools.

    Raises ValueError if the columns match none or several of the forms, or if the tokenizer lacks something that the
    form needs: an end-of-sequence token, a chat template, or character offsets.
    """
    columns = form_of(fields, prompts=targets == "none")
    if columns == ("prompt",) and "completion" in fields:
        # A document's key is a hash of these columns. It must not depend on whether the completion is read.
        columns = ("prompt", "completion")
    if _has_messages(columns, fields):
        return ChatTemplate(tokenizer, columns, targets, processor, tools, end_ids)
    if tools is not None:
        raise ValueError("rollout.tools needs conversations: expected 'messages', or 'prompt' as a list of messages")
    return StringTemplate(tokenizer, columns, targets, end_ids)


def are_conversations(fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a dataset's prompts are rendered by the chat template. fields: those of the first usable record."""
    foreign = foreign_columns(dict(fields), tokenizer, prompts=True)
    native = dict(fields) if foreign is None else foreign.convert(dict(fields))
    return _has_messages(own_forms(native, prompts=True)[0], native)


def _has_messages(columns: tuple[str, ...], fields: Mapping[str, Any]) -> bool:
    return columns[0] == "messages" or (columns[0] == "prompt" and isinstance(fields["prompt"], list))
