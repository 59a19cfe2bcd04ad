"""Turns the strings of a record into token ids and a mask of the tokens to predict.

A template works in two steps: `render` checks one record and turns it into text, so that an error can name the
record. Then `encode` tokenizes a batch of rendered records.

The student must learn to stop. So an end-of-sequence token (EOS) is appended to texts and completions that do not end
with an EOS. Texts that a chat template has rendered already end with an EOS, sometimes followed by a line break. No
token is ever masked because of its id: the pad token often has the same id as the EOS.
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
#: "last": only the last turn of a conversation. "none": a model generates the completions, so only prompts are read
Targets = Tokens | Literal["last", "none"]
#: who adds the beginning-of-sequence token (BOS) to a document; None if documents have no BOS
BosFrom = Literal["tokenizer", "chat template"] | None
Span = tuple[int, int]
Columns = tuple[str, ...]
#: templates do not change this text, because it has no white space, no tags and no characters to escape
ANCHOR = "StillhouseAnchor8f3a"


def token_at(text: str, tokens: Collection[str], start: int = 0) -> str:
    """The longest of these tokens that the text has at position `start`; "" if there is none."""
    return max((token for token in tokens if text.startswith(token, start)), key=len, default="")


@dataclass(frozen=True)
class Encoded:
    """A tokenized record.

    ids: token ids, [n] int32.
    targets: which tokens are targets, [n] bool. The first token and the tokens of media are never targets.
    joined_turns: the number of turns whose first token also contains characters of the prompt.
    media: the files in the order of their tokens. media_spans: the tokens of each file.
    """

    ids: np.ndarray
    targets: np.ndarray
    joined_turns: int = 0
    media: tuple[MediaFile, ...] = ()
    media_spans: tuple[Span, ...] = ()

    @classmethod
    def from_completion(cls, prompt: list[int], completion: list[int], *, is_whole_target: bool = False) -> "Encoded":
        """A document whose targets are the completion's tokens; if `is_whole_target`, all tokens except the first."""
        targets = np.full(len(prompt) + len(completion), is_whole_target)
        targets[len(prompt) :] = True
        targets[:1] = False
        return cls(np.asarray(prompt + completion, dtype=np.int32), targets)

    def pieces(self, max_tokens: int) -> "list[Encoded]":
        """Split a long text into pieces of at most `max_tokens`. Each begins with the previous piece's last token.

        In the later piece, this token is not a target. So every token except the first token is predicted once.
        """
        split = []
        for start in range(0, len(self.ids) - 1, max_tokens - 1):
            targets = self.targets[start : start + max_tokens].copy()
            targets[:1] = False
            split.append(Encoded(self.ids[start : start + max_tokens], targets))
        return split


@dataclass(frozen=True)
class Rendered:
    """A record as text. `prompt` and `body` are tokenized separately. spans: the target characters of a conversation.

    encoded: the record's tokens if it has media, else None. Such records are tokenized when they are rendered, so
        that the error of a file names the record.
    end: the special token with which the chat template ends the assistant's last turn; "" if there is none.
    lost: for each kind of lost text (`written_texts.py`), the name of the first one, such as "'reasoning_content' of
        message 2 of 'messages'".
    turns_without_thoughts: the number of turns whose thoughts are lost.
    """

    body: str
    prompt: str = ""
    spans: tuple[Span, ...] = ()
    encoded: Encoded | None = None
    end: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)
    turns_without_thoughts: int = 0


class Template(Protocol):
    """Turns records of one form into tokens.

    columns: the columns that a record must have. extras: optional columns, which also belong to the record's content.
    splits: whether a record with too many tokens is split into pieces; if not, it is truncated.
    bos_from: who adds the BOS at the beginning of a document.
    adds_special: whether the tokenizer adds its special tokens to the text that a chat template has rendered.
    """

    columns: Columns
    extras: Columns = ()
    splits: bool = False
    adds_special: bool = False
    bos_from: BosFrom

    def render(self, fields: dict[str, Any]) -> Rendered:
        """One record as text. Raises RecordError if the record does not have this form."""
        ...

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]: ...

    def render_prefix(self, text: str) -> str:
        """A prefix as text, to be tokenized without special tokens. Raises RecordError if the template drops it."""
        return text

    def warnings(self) -> list[str]:
        """Warnings about the template for the user, after all records are rendered."""
        return []


class StringTemplate(Template):
    """Records of strings: plain documents (`text`), in which every token is a target, or `prompt` and `completion`.

    The tokenizer's special tokens except an EOS are added to a text or a prompt. An EOS is added to a text or a
    completion. A prompt and its completion are tokenized separately, because generation tokenizes the prompt alone.
    If `targets` is "none", the completion is not read. end_ids: the end-of-sequence ids of the student.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, columns: Columns, targets: Targets, end_ids: Collection[int] = ()
    ):
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so the student "
                "could not learn to stop; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer, self.columns, self.targets, self.splits = tokenizer, columns, targets, columns == ("text",)
        self.end_ids = {tokenizer.eos_token_id, *end_ids}
        #: the ids of a short text between the tokenizer's special tokens
        self.framed = tokenize(tokenizer, ["a"], special=True)[0]
        bos = tokenizer.bos_token_id
        self.bos_from: BosFrom = "tokenizer" if bos is not None and self.framed[:1] == [bos] else None

    def render(self, fields: dict[str, Any]) -> Rendered:
        if self.splits:
            return Rendered(string_value(fields, "text"))
        for column in self.columns:
            column_value(fields, column)
        completion = "" if self.targets == "none" else string_value(fields, "completion")
        return Rendered(completion, prompt=string_value(fields, "prompt", may_be_empty=True))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        bodies = [record.body for record in rendered]
        framed = bodies if self.splits else [record.prompt for record in rendered]
        ids = tokenize(self.tokenizer, framed, special=True)
        if self.framed[-1] == self.tokenizer.eos_token_id:  # remove only an EOS that the tokenizer has appended
            ids = [text_ids[:-1] for text_ids in ids]
        if self.splits:
            return [
                Encoded.from_completion([], self._with_eos(text_ids, text))
                for text_ids, text in zip(ids, bodies, strict=True)
            ]
        if self.targets == "none":
            return [Encoded.from_completion(prompt, []) for prompt in ids]
        completions = tokenize(self.tokenizer, bodies, special=False)
        return [
            Encoded.from_completion(prompt, self._with_eos(completion, text), is_whole_target=self.targets == "all")
            for prompt, completion, text in zip(ids, completions, bodies, strict=True)
        ]

    def _with_eos(self, ids: list[int], text: str) -> list[int]:
        """Append an EOS unless the text already ends with an end-of-sequence token, maybe followed by white space."""
        last = len(ids) - 1
        while text[-1:].isspace() and last > 0 and not self.tokenizer.decode([int(ids[last])]).strip():
            last -= 1
        return ids if ids and ids[last] in self.end_ids else [*ids, self.tokenizer.eos_token_id]
