"""Turns a record's columns into token ids and a mask of the tokens to predict.

There are three forms of record. The first record of a dataset decides which one the dataset has:

    text                    plain documents; every token is a target
    prompt + completion     two strings, or two lists of messages; the completion is the target
    messages                a conversation; the assistant's turns are the target

A chat may have a column `tools`: the functions that the assistant may call. The chat template adds them to the text.

A template works in two steps, so that tokenizing runs in batches while errors still name their record: `render`
checks one record and turns it into text, `encode` tokenizes many rendered records. In the text of a chat, target
spans are ranges of characters; a token that overlaps one is a target.

The student must learn to stop. So the end-of-sequence token is appended to texts and completions without it, and no
token is ever masked by its id (the pad token often has the same id). In chats the template writes the end of a turn.
It belongs to the target, but the white space after it does not.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.chat import Message, Span
from stillhouse.data.conversations import Conversations, Tools, too_long
from stillhouse.data.isolation import Isolated, LimitError
from stillhouse.data.reading import describe
from stillhouse.display import first_line, name_list

Tokens = Literal["completion", "all"]
#: who writes the beginning-of-sequence token (BOS) of a document; None if nobody does
BosFrom = Literal["tokenizer", "chat template"] | None

EXPECTED_COLUMNS = "'messages', 'prompt' and 'completion', or 'text'"  # `columns.py` adds those of other projects
#: most characters of one record in total: a tokenizer takes about 200 bytes of memory for each
MOST_CHARACTERS = 4_000_000
#: what other projects call the weight of a turn, or whether it counts
MASKS = ("weight", "train", "loss")
#: roles as ShareGPT calls them, which chat templates do not know, so that no turn would be a target
OTHER_ROLES = {"human": "user", "gpt": "assistant"}
#: limits of a chat template for one conversation: processor time and memory
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10.0, 2**30


class RecordError(ValueError):
    """One record cannot be used. The message does not name the record's location, which the caller adds."""


class TemplateLimitError(ValueError):
    """The chat template exceeds its limits. It is a fault of the template, so the record is not skipped."""


@dataclass(frozen=True)
class Rendered:
    """A record as text. `prompt` and `body` are tokenized separately; `spans` are a chat's target characters."""

    body: str
    prompt: str = ""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """ids: token ids, [n] int32. targets: which of them are to be predicted, [n] bool; never the first one.

    joined_turns: the number of turns whose first token begins in the prompt.
    """

    ids: np.ndarray
    targets: np.ndarray
    joined_turns: int = 0


class Template(Protocol):
    """Turns records of one form into tokens.

    columns: the columns that a record must have. extras: optional columns, which are part of the record's content if
    present. splits: whether a long record is cut into pieces; otherwise it is cut at its end. bos_from: who writes
    the BOS at the beginning of a document.
    """

    columns: tuple[str, ...]
    extras: tuple[str, ...]
    splits: bool
    bos_from: BosFrom

    def render(self, fields: dict[str, Any]) -> Rendered:
        """One record as text. Raises RecordError if the record does not have this form."""
        ...

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """The tokens of many rendered records."""
        ...

    def render_prefix(self, text: str) -> str:
        """A prefix in the form in which it is tokenized without special tokens. Raises RecordError as `render`."""
        ...


def template_for(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tokens: Tokens) -> Template:
    """The template for a dataset whose first record has these columns.

    Raises ValueError if the columns match none or several of the three forms, or if the tokenizer lacks what the form
    needs: an end-of-sequence token, a chat template, character offsets.
    """
    complete = [form for form in (("messages",), ("prompt", "completion"), ("text",)) if set(form) <= set(fields)]
    found = name_list(fields)
    if not complete and "prompt" in fields:
        only = "only a run whose student writes all completions needs none (section rollout, with share=1)"
        raise ValueError(f"prompts without completions: found {found}; expected a column 'completion'; {only}")
    if not complete:
        raise ValueError(f"no usable columns: found {found}; expected {EXPECTED_COLUMNS} (or ShareGPT's or Alpaca's)")
    if len(complete) > 1:
        raise ValueError(f"ambiguous columns: found {found}; expected only one of {EXPECTED_COLUMNS}")
    columns = complete[0]
    if columns == ("text",):
        return TextTemplate(tokenizer)
    if columns == ("messages",) or isinstance(fields["prompt"], list):
        return ChatTemplate(tokenizer, columns, tokens)
    return CompletionTemplate(tokenizer, tokens)


class TextTemplate:
    """Plain documents, with the tokenizer's own special tokens and an end of sequence; every token is a target."""

    columns: tuple[str, ...] = ("text",)
    extras: tuple[str, ...] = ()
    splits = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.eos = _eos_id(tokenizer)
        self.bos_from = _bos_from(tokenizer)

    def render(self, fields: dict[str, Any]) -> Rendered:
        return Rendered(_string(fields, "text"))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        bodies = tokenize(self.tokenizer, [one.body for one in rendered], special=True)
        return [_encoded([], _with_eos(ids, self.eos), every=True) for ids in bodies]

    def render_prefix(self, text: str) -> str:
        return text


class CompletionTemplate:
    """Prompt and completion as strings, tokenized separately, as when the model is used.

    The prompt gets the tokenizer's special tokens except an end of sequence. The completion gets only an end of
    sequence.
    """

    columns: tuple[str, ...] = ("prompt", "completion")
    extras: tuple[str, ...] = ()
    splits = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Tokens):
        self.tokenizer = tokenizer
        self.every = tokens == "all"
        self.eos = _eos_id(tokenizer)
        self.bos_from = _bos_from(tokenizer)
        # Only an end of sequence that the tokenizer appends is removed from the prompt, never one in its text.
        self.prompt_ends = tokenize(tokenizer, ["a"], special=True)[0][-1] == self.eos

    def render(self, fields: dict[str, Any]) -> Rendered:
        return Rendered(_string(fields, "completion"), prompt=prompt_text(fields))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        prompts = self.encode_prompts([one.prompt for one in rendered])
        completions = tokenize(self.tokenizer, [one.body for one in rendered], special=False)
        pairs = zip(prompts, completions, strict=True)
        return [_encoded(prompt, _with_eos(answer, self.eos), self.every) for prompt, answer in pairs]

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of prompts, also of those that have no completion yet."""
        encoded = tokenize(self.tokenizer, list(prompts), special=True)
        return [ids[:-1] for ids in encoded] if self.prompt_ends else encoded

    def render_prefix(self, text: str) -> str:
        return text


class ChatTemplate:
    """Conversations, rendered by the tokenizer's chat template, which writes all special tokens itself.

    The template's own `{% generation %}` blocks mark the assistant's characters; if it has none, `Turns` finds them.
    Of prompt + completion, only the assistant's turns in the completion are targets. A prefix is a system turn.
    """

    extras: tuple[str, ...] = ("tools",)
    splits = False
    bos_from: BosFrom = "chat template"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...], tokens: Tokens, *, prompts: bool = False
    ):
        if not tokenizer.chat_template:
            raise ValueError(
                f"the data holds messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; give 'text' or 'prompt' and 'completion' as strings, or set data.chat_template"
            )
        if not tokenizer.is_fast:
            raise ValueError(f"chats need a fast tokenizer (character offsets), got {type(tokenizer).__name__}")
        tokenizer.get_chat_template()  # raises if there are several templates and no default
        self.tokenizer = tokenizer
        self.columns = columns
        # Not a method of this template: a reference cycle would keep the template and its process alive.
        answer = Conversations(
            tokenizer, every=tokens == "all", most_characters=MOST_CHARACTERS, prompts=prompts
        ).answer
        self.render_isolated = Isolated(answer, seconds=TEMPLATE_SECONDS, memory_bytes=TEMPLATE_BYTES)

    def render(self, fields: dict[str, Any]) -> Rendered:
        parts = [self.messages(fields, column) for column in self.columns]
        messages = [message for part in parts for message in part]
        first = 0 if len(parts) == 1 else len(parts[0])  # the first message that may be a target
        for number, message in enumerate(parts[-1], start=1):
            _require_targets(message, f"message {number} of '{self.columns[-1]}'")
        body, spans = self.conversation(fields, messages, first)
        return Rendered(body, spans=tuple((begin, end) for begin, end in spans))

    def messages(self, fields: dict[str, Any], column: str) -> list[Message]:
        """The checked messages of a column. Raises RecordError."""
        return _messages(fields, column)

    def conversation(self, fields: dict[str, Any], messages: list[Message], first: int) -> tuple[str, list[Span]]:
        """A record's messages as text, and its targets from message `first` on. Raises RecordError."""
        tools = _tools(fields)
        check_length(sum(len(message.get("content", "")) for message in messages), " and ".join(self.columns))
        body, spans = self._with_spans(messages, tools, first)
        check_encodable(body, f"'{self.columns[0]}'")
        return body, spans

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        batch = self.tokenizer(
            [one.body for one in rendered],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            _chat_encoded(ids, offsets, one.spans)
            for ids, offsets, one in zip(batch["input_ids"], batch["offset_mapping"], rendered, strict=True)
        ]

    def render_prefix(self, text: str) -> str:
        rendered = self._with_spans([{"role": "system", "content": text}], None, None)[0]
        # Some templates write a system turn as a part of the user's turn, and nothing if there is none.
        if "".join(text.split()) not in "".join(rendered.split()):
            raise RecordError(
                f"the chat template writes a system turn with this text alone as {shorten(rendered, 80)!r}, without "
                "the text: expected a template that writes it (data.chat_template), or records with strings"
            )
        return rendered

    def _with_spans(self, messages: list[Message], tools: Tools, first: int | None) -> tuple[str, list[Span]]:
        try:
            body, spans, problem = self.render_isolated(messages, tools, first)
        except LimitError as error:
            raise TemplateLimitError(f"the chat template of {self.tokenizer.name_or_path!r}: {error}") from error
        if problem:
            raise RecordError(problem)
        return body, spans


def _chat_encoded(ids: list[int], offsets: list[Span], spans: tuple[Span, ...]) -> Encoded:
    begins_T, ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    targets_T = np.zeros(len(ids), dtype=bool)
    joined = 0
    for begin, end in spans:
        targets_T |= (begins_T < end) & (ends_T > begin)
        joined += bool(((begins_T < begin) & (ends_T > begin)).any())
    targets_T[:1] = False
    return Encoded(np.asarray(ids, dtype=np.int32), targets_T, joined)


def _encoded(prompt: list[int], completion: list[int], every: bool) -> Encoded:
    targets_T = np.full(len(prompt) + len(completion), every)
    targets_T[len(prompt) :] = True
    targets_T[:1] = False
    return Encoded(np.asarray(prompt + completion, dtype=np.int32), targets_T)


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)["input_ids"]


def _with_eos(ids: list[int], eos: int) -> list[int]:
    return ids if ids and ids[-1] == eos else ids + [eos]


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so the student "
            "could not learn to stop; set eos_token in its tokenizer_config.json"
        )
    return tokenizer.eos_token_id


def _bos_from(tokenizer: PreTrainedTokenizerBase) -> BosFrom:
    bos = tokenizer.bos_token_id
    return None if bos is None or tokenize(tokenizer, ["a"], special=True)[0][:1] != [bos] else "tokenizer"


def prompt_text(fields: dict[str, Any]) -> str:
    """The checked prompt of a record. Raises RecordError."""
    return _string(fields, "prompt", may_be_empty=True)


def column_value(fields: Mapping[str, Any], column: str) -> Any:
    if column not in fields:
        raise RecordError(f"column '{column}' is missing (found {name_list(fields)})")
    return fields[column]


def _string(fields: dict[str, Any], column: str, may_be_empty: bool = False) -> str:
    value = column_value(fields, column)
    if not isinstance(value, str):
        raise RecordError(f"'{column}' must be a string, got {describe(value)}")
    if not value and not may_be_empty:
        raise RecordError(f"'{column}' is empty")
    check_length(len(value), f"'{column}'")
    check_encodable(value, f"'{column}'")
    return value


def check_length(characters: int, what: str) -> None:
    if characters > MOST_CHARACTERS:
        raise RecordError(too_long(what, characters, MOST_CHARACTERS))


def check_encodable(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{what} contains half of a surrogate pair at character {error.start + 1}") from error


def _messages(fields: dict[str, Any], column: str) -> list[Message]:
    value = column_value(fields, column)
    if not isinstance(value, list):
        raise RecordError(f"'{column}' must be a list of messages, got {describe(value)}")
    if not value:
        raise RecordError(f"'{column}' is empty")
    return [_message(message, f"message {number} of '{column}'") for number, message in enumerate(value, start=1)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise RecordError(f"{name} must be an object with 'role' and 'content', got {describe(message)}")
    message = {key: value for key, value in message.items() if value is not None}  # Parquet adds absent keys as null
    for key in ("role", "content"):
        if key == "content" and message.get("tool_calls"):
            continue
        if key not in message:
            raise RecordError(f"{name} has no '{key}' (found {name_list(message)})")
        if not isinstance(message[key], str):
            raise RecordError(f"'{key}' of {name} must be a string, got {describe(message[key])}")
    if (role := message["role"]) in OTHER_ROLES:
        raise RecordError(f"'role' of {name} is {role!r}: expected {OTHER_ROLES[role]!r} (system, user, assistant)")
    return message


def _require_targets(message: Message, name: str) -> None:
    """Raise RecordError for a turn that other projects would leave out of the loss, because nothing here does."""
    mask = next((key for key in MASKS if message.get(key) in (False, 0)), None)
    if mask is not None and message["role"] == "assistant":
        raise RecordError(
            f"'{mask}' of {name} is {describe(message[mask])}, but every turn of the assistant is a target: expected"
            " 'prompt' and 'completion' as two lists of messages, or records without such turns"
        )


def _tools(fields: dict[str, Any]) -> Tools:
    """The record's tools. They are a list of objects, or the JSON text of one: Parquet stores objects with different
    keys as text.
    """
    given = tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"'tools' is a string, but not JSON ({first_line(error)}), got {describe(given)}"
            ) from error
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"'tools' must be a list of objects, or the JSON of one, got {describe(given)}")
    for number, tool in enumerate(tools or [], start=1):
        if not isinstance(tool, dict):
            raise RecordError(f"tool {number} of 'tools' must be an object, got {describe(tool)}")
    return (tools if isinstance(given, str) else without_null(tools)) or None


def without_null(value: Any) -> Any:
    """The value without the keys whose value is null, because Parquet fills absent keys with null."""
    if isinstance(value, dict):
        return {key: without_null(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_null(inner) for inner in value]
    return value
