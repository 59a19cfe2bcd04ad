"""Turns the strings of a record into token ids and a mask of the tokens to predict.

A template works in two steps: `render` checks one record and turns it into text, so that an error can name the
record. Then `encode` tokenizes a batch of rendered records.

The student must learn to stop. So an end-of-sequence token (EOS) is appended to texts and completions that do not end
with an EOS. Texts that a chat template has rendered already end with one, and maybe with a line break behind it. No
token is ever masked by its id, because the pad token often has the id of the EOS.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.media_files import MediaFile
from stillhouse.data.record import column_value, string_value
from stillhouse.data.render.tokenizers import tokenize

Tokens = Literal["completion", "all"]
#: "none" if a model generates the completions: only the prompt of a record is read
Targets = Tokens | Literal["none"]
#: who adds the beginning-of-sequence token (BOS) to a document; None if documents have no BOS
BosFrom = Literal["tokenizer", "chat template"] | None
Span = tuple[int, int]
#: templates do not change this text: it has no white space, no tags and no characters to escape
ANCHOR = "StillhouseAnchor8f3a"


def token_at(text: str, tokens: Collection[str], start: int = 0) -> str:
    """The longest of these tokens at a position of a text; "" if there is none."""
    return max((token for token in tokens if text.startswith(token, start)), key=len, default="")


@dataclass(frozen=True)
class Encoded:
    """A tokenized record.

    ids: token ids, [n] int32.
    targets: which tokens are targets, [n] bool. The first token is never a target, and no token of media.
    joined_turns: the number of turns whose first token also has characters of the prompt.
    media: in the order of their tokens.
    media_spans: the tokens of each of them.
    """

    ids: np.ndarray
    targets: np.ndarray
    joined_turns: int = 0
    media: tuple[MediaFile, ...] = ()
    media_spans: tuple[Span, ...] = ()

    @property
    def media_end(self) -> int:
        """The position after the last token of media; 0 without media."""
        return max((stop for _, stop in self.media_spans), default=0)

    def pieces(self, max_tokens: int) -> "list[Encoded]":
        """Split a long text into pieces of at most `max_tokens`. Each begins with the last token of the previous one.

        This token is not a target of the later piece. So every token except the first is predicted once.
        """
        split = []
        for start in range(0, len(self.ids) - 1, max_tokens - 1):
            targets = self.targets[start : start + max_tokens].copy()
            targets[:1] = False
            split.append(Encoded(self.ids[start : start + max_tokens], targets))
        return split


@dataclass(frozen=True)
class Rendered:
    """A record as text. `prompt` and `body` are tokenized separately. spans: the target characters of a chat.

    encoded: the record's tokens if it has media, because an error of a file must name the record.
    end: the special token with which the template of a conversation ends the assistant's last turn; "" without one.
    lost: the first text of a chat of each kind (`written_texts.py`) that the template leaves out or changes, such as
        "'reasoning_content' of message 2 of 'messages'".
    """

    body: str
    prompt: str = ""
    spans: tuple[Span, ...] = ()
    encoded: Encoded | None = None
    end: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)


class Template(Protocol):
    """Turns records of one form into tokens.

    columns: the columns that a record must have.
    extras: optional columns, which are part of the record's content.
    splits: whether a long record is split into pieces; otherwise it is truncated.
    bos_from: who adds the BOS at the beginning of a document.
    adds_special: whether the tokenizer adds its special tokens to the text that a chat template has rendered.
    """

    columns: tuple[str, ...]
    extras: tuple[str, ...] = ()
    splits: bool = False
    adds_special: bool = False
    bos_from: BosFrom

    def render(self, fields: dict[str, Any]) -> Rendered:
        """One record as text. Raises RecordError if the record does not have this form."""
        ...

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        """Tokenize a batch of rendered records."""
        ...

    def render_prefix(self, text: str) -> str:
        """The text of a prefix, which is tokenized with add_special_tokens=False. Raises RecordError."""
        return text

    def warnings(self) -> list[str]:
        """What the user should know about the template, after all records."""
        return []


class _StringTemplate(Template):
    """Records of strings; the tokenizer adds its special tokens. end_ids: the end-of-sequence ids of the student."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int] = ()):
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so the student "
                "could not learn to stop; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        self.end_ids = {self.eos, *end_ids}
        #: the ids of a short text between the tokenizer's special tokens
        self.framed = tokenize(tokenizer, ["a"], special=True)[0]
        bos = tokenizer.bos_token_id
        self.bos_from = "tokenizer" if bos is not None and self.framed[:1] == [bos] else None

    def without_eos(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids with the tokenizer's special tokens, except an EOS that it appends. An EOS in a text stays."""
        ids = tokenize(self.tokenizer, texts, special=True)
        return [text_ids[:-1] for text_ids in ids] if self.framed[-1] == self.eos else ids

    def with_eos(self, ids: list[int], text: str) -> list[int]:
        """Append an EOS unless the text ends with an end-of-sequence token, or with one and white space."""
        last = len(ids) - 1
        while text[-1:].isspace() and last > 0 and not self.tokenizer.decode([int(ids[last])]).strip():
            last -= 1
        return ids if ids and ids[last] in self.end_ids else [*ids, self.eos]


class TextTemplate(_StringTemplate):
    """Plain documents with the tokenizer's own special tokens and an EOS. Every token is a target."""

    columns: tuple[str, ...] = ("text",)
    splits = True

    def render(self, fields: dict[str, Any]) -> Rendered:
        return Rendered(string_value(fields, "text"))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        texts = [record.body for record in rendered]
        pairs = zip(self.without_eos(texts), texts, strict=True)
        return [with_targets([], self.with_eos(ids, text)) for ids, text in pairs]


class CompletionTemplate(_StringTemplate):
    """Prompt and completion as strings. They are tokenized separately, because generation tokenizes prompts alone.

    The prompt gets the tokenizer's special tokens except an EOS. The completion gets only an EOS. Without targets,
    the completion is not read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: tuple[str, ...],
        targets: Targets,
        end_ids: Collection[int] = (),
    ):
        super().__init__(tokenizer, end_ids)
        self.columns, self.targets = columns, targets

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        completion = "" if self.targets == "none" else string_value(fields, "completion")
        return Rendered(completion, prompt=string_value(fields, "prompt", may_be_empty=True))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        prompts = self.without_eos([record.prompt for record in rendered])
        if self.targets == "none":
            return [with_targets(prompt, []) for prompt in prompts]
        texts = [record.body for record in rendered]
        completions = tokenize(self.tokenizer, texts, special=False)
        return [
            with_targets(prompt, self.with_eos(completion, text), self.targets == "all")
            for prompt, completion, text in zip(prompts, completions, texts, strict=True)
        ]


def with_targets(prompt: list[int], completion: list[int], every: bool = False) -> Encoded:
    """A document whose targets are the completion's tokens, or all tokens except the first if `every` is true."""
    targets_T = np.full(len(prompt) + len(completion), every)
    targets_T[len(prompt) :] = True
    targets_T[:1] = False
    return Encoded(np.asarray(prompt + completion, dtype=np.int32), targets_T)
