"""Turns the messages of a record into token ids and a mask of the tokens to predict.

The tokenizer's chat template writes all text around the messages. The end marker of a turn is a target, but not the
white space after it. Spans of targets are ranges of characters of the rendered text. A token that overlaps a span is
a target. A record may have a column `tools` with the functions that the assistant may call. The template adds them to
the text.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from textwrap import shorten
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.media import MediaProcessor
from stillhouse.data.media_files import MediaFile
from stillhouse.data.read.messages import (
    Message,
    Tools,
    messages_of,
    require_among,
    require_targets,
    text_of,
    tools_of,
    with_arguments,
    with_parts,
)
from stillhouse.data.record import (
    ProcessorError,
    RecordError,
    TemplateLimitError,
    TemplateSyntaxError,
    column_value,
    require_encodable,
    require_length,
    value_in_words,
)
from stillhouse.data.render.conversations import Conversations
from stillhouse.data.render.isolated_process import Isolated, LimitError
from stillhouse.data.render.templates import ANCHOR, BosFrom, Encoded, Rendered, Span, Targets, Template
from stillhouse.data.render.tokenizers import encode, is_rendered
from stillhouse.data.render.written_texts import Lost, is_refused
from stillhouse.display import name_list

#: the roles that are tried if the template does not write a message. The error suggests those that it writes
ROLES = ("system", "developer", "user", "assistant", "tool")
#: limits of processor time and memory for rendering one conversation
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10.0, 2**30


class ChatTemplate(Template):
    """Turns conversations into tokens. The tokenizer's chat template renders them, with all special tokens.

    The template's own `{% generation %}` blocks mark the assistant's characters. Without such blocks, `Turns` finds
    these characters. In records with prompt and completion, only the assistant's turns in the completion are targets.
    If `targets` is "last", only the last message is a target, and it must be the assistant's.
    A teacher's prefix becomes a system turn. If `targets` is "none", the assistant's turns at the end of the
    conversation are replaced by the generation prompt.

    processor: the processor of a model that reads media, else None. With a processor, the tokenizer adds its special
    tokens to a rendered text that does not begin with a BOS, as in transformers; and if the template only writes
    contents that are lists of parts, all contents become such lists.
    tools: the tools of the run. A record's own tools must be among them.
    end_ids: the end-of-sequence ids of the student (see `Turns`).
    """

    extras: tuple[str, ...] = ("tools",)

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: tuple[str, ...],
        targets: Targets,
        processor: MediaProcessor | None = None,
        tools: Tools = None,
        end_ids: Collection[int] = (),
    ):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the data has messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; give 'text' or 'prompt' and 'completion' as strings, or set data.chat_template"
            )
        if not tokenizer.is_fast:
            raise ValueError(f"messages need a fast tokenizer (character offsets), got {type(tokenizer).__name__}")
        tokenizer.get_chat_template()  # raises if there are several templates and no default
        self.tokenizer, self.columns, self.targets, self.processor = tokenizer, columns, targets, processor
        self.tools = tools
        #: for `warnings`: the first prompt; the first conversation with tools, and its `first` for `_rendered`
        self._prompt_example: tuple[list[Message], Tools] | None = None
        self._tools_example: tuple[list[Message], Tools, int] | None = None
        # `Isolated` gets no method of this object: a reference cycle would keep this object and its process alive.
        conversations = Conversations(tokenizer, targets, end_ids)
        self.isolated = Isolated(
            lambda request: json.dumps(conversations.answer(*json.loads(request))).encode(),
            seconds=TEMPLATE_SECONDS,
            memory_bytes=TEMPLATE_BYTES,
        )
        self.needs_parts, self.adds_special = False, False
        if processor is not None:
            example: Message = {"role": "user", "content": ANCHOR}
            self.needs_parts = ANCHOR not in self._answer([example], None, None)[0]
            form = with_parts(example) if self.needs_parts else example
            self.adds_special = not is_rendered(tokenizer, self._answer([form], None, None)[0])
        has_bos = self.adds_special and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.bos_from: BosFrom = "tokenizer" if has_bos else "chat template"

    def render(self, fields: dict[str, Any]) -> Rendered:
        is_last = self.targets == "last"
        if self.targets == "none":
            for column in self.columns:
                column_value(fields, column)
            messages, first = messages_of(fields, name := self.columns[0]), 0
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if not messages:
                raise RecordError(f"'{name}' has only turns of the assistant, got {value_in_words(fields[name])}")
        else:
            by_column = [messages_of(fields, column) for column in self.columns]
            messages = [message for column_messages in by_column for message in column_messages]
            first = len(messages) - len(by_column[-1])  # the index of the first message of the last column
            if is_last:
                self._require_answer(messages[-1])
            require_targets(by_column[-1], self.columns[-1], len(by_column[-1]) - 1 if is_last else 0)
        tools = tools_of(fields)
        if self.tools is not None:
            tools = self.tools if tools is None else require_among(tools, self.tools)
        require_length(sum(len(text_of(message)) for message in messages), " and ".join(self.columns))
        messages, media = _without_media(messages)
        start = len(messages) - 1 if is_last else first  # the index of the first message that can be a target
        rendered, lost = self._rendered(messages, tools, start)
        if self.targets == "none":
            self._prompt_example = self._prompt_example or (messages, tools)
        if tools:
            self._tools_example = self._tools_example or (messages, tools, start)
        require_encodable(rendered.body, f"'{self.columns[0]}'")
        if lost:
            self._require_written(messages, tools, first, lost)
            if self.targets in ("completion", "last"):  # templates drop thoughts before the last question on purpose
                lost = [loss for loss in lost if loss.kind != "thought" or loss.message >= start]
            rendered = replace(
                rendered,
                lost={loss.kind: self._name_of(loss, first) for loss in reversed(lost)},
                turns_without_thoughts=len({loss.message for loss in lost if loss.kind == "thought"}),
            )
        return self._with_media(rendered, media) if media else rendered

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        encoded = [record.encoded for record in rendered]
        if texts := [number for number, document in enumerate(encoded) if document is None]:
            bodies = [rendered[number].body for number in texts]
            batch = encode(self.tokenizer, bodies, add_special_tokens=self.adds_special, return_offsets_mapping=True)
            for number, ids, offsets in zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True):
                encoded[number] = _with_targets(ids, offsets, rendered[number].spans)
        return [document for document in encoded if document is not None]

    def warnings(self) -> list[str]:
        lines, name = [], self.tokenizer.name_or_path
        if self._tools_example is not None:
            messages, tools, first = self._tools_example
            if self._text_or_none(messages, tools, first) == self._text_or_none(messages, None, first):
                lines.append(
                    f"the chat template of {name!r} does not write the descriptions of tools: the model does not see "
                    "them; expected a template that writes them (data.chat_template), or descriptions in the messages"
                )
        if self._prompt_example is not None:
            messages, tools = self._prompt_example
            prompt, bare = (self._text_or_none(messages, tools, first) for first in (0, None))
            answer: Message = {"role": "assistant", "content": ANCHOR}
            answered = self._text_or_none([*messages, answer], tools, None)
            heading = ""  # the text before the assistant's content if the template has no generation prompt
            if prompt is not None and prompt == bare and answered is not None and answered.startswith(prompt):
                heading = answered.removeprefix(prompt).partition(ANCHOR)[0] if ANCHOR in answered else ""
            if heading.strip():  # without a generation prompt, a heading of white space is harmless
                lines.append(
                    f"the chat template of {name!r} writes no generation prompt (add_generation_prompt changes "
                    f"nothing): a prompt does not end with {heading!r}, with which the template begins a turn of the "
                    "assistant, so that the student must generate it; expected a template with a generation prompt "
                    "(data.chat_template)"
                )
        return lines

    def _text_or_none(self, messages: list[Message], tools: Tools, first: int | None) -> str | None:
        """The text; None if the template refuses the conversation."""
        try:
            return self._rendered(messages, tools, first)[0].body
        except RecordError:
            return None

    def render_prefix(self, text: str) -> str:
        rendered, lost = self._rendered([{"role": "system", "content": text}], None, None)
        if lost:  # some templates write the system turn into the user's turn, and drop it if there is no user's turn
            raise RecordError(
                f"the chat template writes a single system turn as {shorten(rendered.body, 80)!r}, without its text: "
                "expected a template that writes the text (data.chat_template), or records with strings, not messages"
            )
        return rendered.body

    def text(self, messages: list[Message], tools: Tools, *, prompt: bool) -> str:
        """The messages as text. prompt: whether the generation prompt follows, which requires `targets` to be "none".
        Raises RecordError if the template refuses the messages.
        """
        assert not prompt or self.targets == "none"
        return self._rendered(messages, tools, 0 if prompt else None)[0].body

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether the template needs the arguments of calls as JSON text, because it joins them with other texts
        (DeepSeek-V3) or would write an object as Python does.
        """
        arguments, texts = {"a": ANCHOR}, []
        function = {"name": "f", "description": "a", "parameters": {"type": "object", "properties": {}}}
        for form in (arguments, json.dumps(arguments)):
            # Mistral's templates require an id of this form
            call = {"id": "000000000", "type": "function", "function": {"name": "f", "arguments": form}}
            messages: list[Message] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            if self.needs_parts:
                messages = [with_parts(message) for message in messages]
            texts.append(self._answer(messages, [{"type": "function", "function": function}], None)[0])
        as_object, as_text = texts
        return (ANCHOR not in as_object or str(arguments) in as_object) and json.dumps(arguments) in as_text

    def _with_media(self, rendered: Rendered, media: tuple[MediaFile, ...]) -> Rendered:
        if self.processor is None:
            raise ProcessorError(
                f"the record has images, but {self.tokenizer.name_or_path!r} has no processor for images (no "
                "processor_config.json or preprocessor_config.json): expected a student that reads images"
            )
        self.processor.prepare()
        expanded = self.processor.expand(rendered.body, media, special=self.adds_special)
        encoded = _with_targets(expanded.ids, expanded.offsets, expanded.shifted(rendered.spans))
        spans = expanded.media_spans()
        for start, stop in spans:
            encoded.targets[start:stop] = False
        return replace(rendered, encoded=replace(encoded, media=media, media_spans=spans))

    def _answer(self, messages: list[Message], tools: Tools, first: int | None) -> Any:
        """Return the result of `Conversations.answer`; the text is "" if the template refuses the messages. A value
        of a type that JSON lacks becomes the name of its type. A dict key of such a type raises TypeError.
        """
        request = json.dumps([messages, tools, first], default=lambda value: f"<{type(value).__name__}>")
        return json.loads(self.isolated(request.encode()))

    def _rendered(self, messages: list[Message], tools: Tools, first: int | None) -> tuple[Rendered, list[Lost]]:
        if self.needs_parts:
            messages = [with_parts(message) for message in messages]
        if any(message.get("tool_calls") or message.get("function_call") for message in messages):
            messages = [with_arguments(message, as_text=self._joins_arguments) for message in messages]
        try:
            body, spans, end, lost, problem, is_syntax = self._answer(messages, tools, first)
        except LimitError as error:
            raise TemplateLimitError(f"the chat template of {self.tokenizer.name_or_path!r}: {error}") from error
        if is_syntax:
            raise TemplateSyntaxError(self.tokenizer.name_or_path, problem)
        if problem:
            raise RecordError(problem)
        rendered = Rendered(body, spans=tuple((start, stop) for start, stop in spans), end=end)
        return rendered, [Lost(*loss) for loss in lost]

    def _require_written(self, messages: list[Message], tools: Tools, first: int, lost: list[Lost]) -> None:
        loss = next(filter(is_refused, lost), None)
        if loss is None:
            return
        place, role = self._name_of(loss, first), messages[loss.message]["role"]
        name = self.tokenizer.name_or_path
        if loss.kind == "object":
            raise RecordError(
                f"the chat template of {name!r} writes the parts of {place} as objects, and not as text: expected a "
                "template that reads parts (data.chat_template), or a string"
            )
        has_calls = any(messages[loss.message].get(key) for key in ("tool_calls", "function_call"))
        written = []
        for other in () if has_calls else ROLES:
            turns = list(messages)
            turns[loss.message] = {"role": other, "content": ANCHOR}
            if ANCHOR in (self._text_or_none(turns, tools, None) or ""):
                written.append(other)
        if written and role not in written:
            raise RecordError(
                f"the chat template of {name!r} does not write {place}, whose role is {role!r}: expected a role that "
                f"it writes there ({name_list(written)}), or a template that writes this role (data.chat_template)"
            )
        beside = " together with its calls" if has_calls and "call" not in loss.what else ""
        raise RecordError(
            f"the chat template of {name!r} does not write {place}{beside}: expected a template that writes it "
            "(data.chat_template), or records without it"
        )

    def _require_answer(self, last: Message) -> None:
        if last["role"] != "assistant":
            raise RecordError(
                f"the last message of '{self.columns[-1]}' has the role {last['role']!r}, so data.turns=last has no "
                "target: expected conversations that end with a turn of the assistant, or data.turns=all"
            )

    def _name_of(self, loss: Lost, first: int) -> str:
        is_last = loss.message >= first and self.targets != "none"
        column, number = self.columns[-1 if is_last else 0], loss.message + 1 - (first if is_last else 0)
        return f"{loss.what} of message {number} of '{column}'"


def _with_targets(ids: list[int], offsets: list[Span], spans: tuple[Span, ...]) -> Encoded:
    begins_T, ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    targets_T = np.zeros(len(ids), dtype=bool)
    joined = 0
    for begin, end in spans:
        targets_T |= (begins_T < end) & (ends_T > begin)
        joined += bool(((begins_T < begin) & (ends_T > begin)).any())
    targets_T[:1] = False
    return Encoded(np.asarray(ids, dtype=np.int32), targets_T, joined)


def _without_media(messages: list[Message]) -> tuple[list[Message], tuple[MediaFile, ...]]:
    """The messages without the values of parts with media, which chat templates do not read; and these values."""
    media: list[MediaFile] = []
    bare = list(messages)
    for number, message in enumerate(messages):
        if isinstance(content := message.get("content"), list):
            media += [part[part["type"]] for part in content if part["type"] != "text"]
            parts = [part if part["type"] == "text" else {"type": part["type"]} for part in content]
            bare[number] = message | {"content": parts}
    return bare, tuple(media)
