"""What a user should know about the tokens of records: unexpected ones, and those with which they teach to stop."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.read.messages import MARK
from stillhouse.data.render.templates import Encoded, Rendered, Targets
from stillhouse.data.render.tokenizers import tokenize

#: how warnings of lost texts go on, by their kind (`render/written_texts.py`)
_LOST = {
    "thought": (
        ", so that the student does not learn it. Templates of reasoning models leave out the thoughts of turns "
        "before the last question, and read one name of thoughts alone. To train on them: a template that writes "
        "them (data.chat_template), or a record for each turn, as 'prompt' and 'completion'"
    ),
    "changed": " as it is, but with changes inside the text",
    "key": ", so that the student does not see it",
}


@dataclass
class _Records:
    """The number of some records, the place of the first one, and what its warning names."""

    count: int = 0
    first: str = ""
    what: str = ""

    def add(self, where: str, what: str = "") -> None:
        self.count += 1
        self.first, self.what = self.first or where, self.what or what


class TextWarnings:
    """Counts the records of a source that need a warning."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Targets):
        self._tokenizer, self._targets = tokenizer, targets
        self._with_mark, self._with_space = _Records(), _Records()
        self._lost = {kind: _Records() for kind in _LOST}

    def add(self, rendered: Rendered, where: str) -> None:
        """where: `file:line` of the record."""
        if MARK in rendered.prompt + rendered.body and (rendered.encoded is None or not rendered.encoded.media):
            self._with_mark.add(where)
        for kind, what in rendered.lost.items():
            self._lost[kind].add(where, what)
        if self._has_space_before_completion(rendered):
            self._with_space.add(where)

    def lines(self) -> list[str]:
        lines, mark, space = [], self._with_mark, self._with_space
        if mark.count:
            lines.append(
                f"{mark.first}: its text has {MARK}, and the record has no image, so that {MARK} is read as text; "
                f"expected a column images if it marks the place of one (such records: {mark.count:,})"
            )
        for kind, lost in self._lost.items():
            if lost.count:
                lines.append(
                    f"{lost.first}: the chat template does not write {lost.what}{_LOST[kind]} "
                    f"(such records: {lost.count:,})"
                )
        if space.count and self._joins_spaces():
            lines.append(
                f"{space.first}: the prompt ends with a space, which this tokenizer joins with a word behind it, so "
                "that a completion has other tokens at its beginning than the same text in one piece, as models have "
                "read it; expected no space at the end of prompts and of the chat template's generation prompt "
                f"(data.chat_template), and completions that begin with it (such records: {space.count:,})"
            )
        return lines

    def _has_space_before_completion(self, rendered: Rendered) -> bool:
        if self._targets == "none":
            return (rendered.body or rendered.prompt).endswith(" ")
        return rendered.prompt.endswith(" ") or any(
            rendered.body[begin - 1] == " " for begin, _ in rendered.spans if begin
        )

    def _joins_spaces(self) -> bool:
        """Whether a space and a letter have other tokens together than one after the other."""
        whole, space, letter = tokenize(self._tokenizer, ["a a", "a ", "a"], special=False)
        return whole != space + letter


class TrainedEnds:
    """Collects the tokens with which the documents of a source teach the student to stop.

    end_ids: the end-of-sequence ids of tokenizer and student. They count wherever they are targets. So does the
    special token with which the template ends the assistant's last turn (see `Rendered.end`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]):
        self._end_ids = sorted(end_ids)
        self._special = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.ids: set[int] = set()

    def add(self, encoded: Encoded, kept: int, end: str) -> None:
        """kept: the number of tokens of the document that are trained on. end: see `Rendered`."""
        ids_T = encoded.ids[:kept][encoded.targets[:kept]]
        ends = [*self._end_ids, *([self._special[end]] if end in self._special else [])]
        self.ids.update(ids_T[np.isin(ids_T, ends)].tolist())
