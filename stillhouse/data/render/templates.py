"""Turns the strings of a record into token ids and a mask of the tokens to predict.

A template works in two steps, so that tokenizing runs in batches while errors still name their record: `render`
checks one record and turns it into text, `encode` tokenizes many rendered records.

The student must learn to stop. So the end-of-sequence token is appended to texts and completions without it, and no
token is ever masked by its id (the pad token often has the same id).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.record import column_value, string_value
from stillhouse.data.render.assistant_turns import Span
from stillhouse.data.render.tokenizers import tokenize

Tokens = Literal["completion", "all"]
#: "none" where a model writes the completions: only the part of a record before the completion is read
Targets = Tokens | Literal["none"]
#: what writes the beginning-of-sequence token (BOS) of a document; None if nothing does
BosFrom = Literal["tokenizer", "chat template"] | None


@dataclass(frozen=True)
class Rendered:
    """A record as text. `prompt` and `body` are tokenized separately; `spans` are a chat's target characters."""

    body: str
    prompt: str = ""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Encoded:
    """A tokenized record.

    ids: token ids, [n] int32.
    targets: which tokens are to be predicted, [n] bool; never the first token.
    joined_turns: the number of turns whose first token begins in the prompt.
    """

    ids: np.ndarray
    targets: np.ndarray
    joined_turns: int = 0


class Template(Protocol):
    """Turns records of one form into tokens.

    columns: the columns that a record must have.
    extras: optional columns, which are part of the record's content if present.
    splits: whether a long record is cut into pieces; otherwise it is cut at its end.
    bos_from: what writes the BOS at the beginning of a document.
    """

    columns: tuple[str, ...]
    extras: tuple[str, ...] = ()
    splits: bool = False
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


class _StringTemplate(Template):
    """Records of strings, to which the tokenizer adds its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token, so the student "
                "could not learn to stop; set eos_token in its tokenizer_config.json"
            )
        self.tokenizer, self.eos = tokenizer, tokenizer.eos_token_id
        #: the ids of a text with the special tokens that the tokenizer puts around it
        self.framed = tokenize(tokenizer, ["a"], special=True)[0]
        bos = tokenizer.bos_token_id
        self.bos_from = "tokenizer" if bos is not None and self.framed[:1] == [bos] else None

    def render_prefix(self, text: str) -> str:
        return text

    def with_eos(self, ids: list[int]) -> list[int]:
        """The ids with an end of sequence behind them, which is appended unless they end with it."""
        return ids if ids and ids[-1] == self.eos else [*ids, self.eos]


class TextTemplate(_StringTemplate):
    """Plain documents, with the tokenizer's own special tokens and an end of sequence; every token is a target."""

    columns: tuple[str, ...] = ("text",)
    splits = True

    def render(self, fields: dict[str, Any]) -> Rendered:
        return Rendered(string_value(fields, "text"))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        bodies = tokenize(self.tokenizer, [record.body for record in rendered], special=True)
        return [with_targets([], self.with_eos(ids)) for ids in bodies]


class CompletionTemplate(_StringTemplate):
    """Prompt and completion as strings, tokenized separately, as when the model is used.

    The prompt gets the tokenizer's special tokens except an end of sequence. The completion gets only an end of
    sequence; without targets, it is not read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: tuple[str, ...], targets: Targets):
        super().__init__(tokenizer)
        self.columns, self.targets = columns, targets

    def render(self, fields: dict[str, Any]) -> Rendered:
        for column in self.columns:
            column_value(fields, column)
        completion = "" if self.targets == "none" else string_value(fields, "completion")
        return Rendered(completion, prompt=string_value(fields, "prompt", may_be_empty=True))

    def encode(self, rendered: Sequence[Rendered]) -> list[Encoded]:
        prompts = tokenize(self.tokenizer, [record.prompt for record in rendered], special=True)
        if self.framed[-1] == self.eos:
            # Only an end of sequence that the tokenizer appends is removed from the prompt, never one in its text.
            prompts = [ids[:-1] for ids in prompts]
        if self.targets == "none":
            return [with_targets(prompt, []) for prompt in prompts]
        completions = tokenize(self.tokenizer, [record.body for record in rendered], special=False)
        return [
            with_targets(prompt, self.with_eos(completion), self.targets == "all")
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


def with_targets(prompt: list[int], completion: list[int], every: bool = False) -> Encoded:
    """A document of which the completion is to be predicted, or every token, but never the first one."""
    targets_T = np.full(len(prompt) + len(completion), every)
    targets_T[len(prompt) :] = True
    targets_T[:1] = False
    return Encoded(np.asarray(prompt + completion, dtype=np.int32), targets_T)
