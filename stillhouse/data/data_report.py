"""How many records of a data source were used, cut or skipped, and warnings about their texts."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.read.messages import MARK
from stillhouse.data.render.templates import Encoded, Rendered, Targets
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.display import escaped, name_list

#: how the source of a document ends if the document is a piece of a record
_PIECE = re.compile(r" \(piece \d+ of \d+\)$")


def documents_in_words(records: int, pieces: int) -> str:
    """The number of documents, and the number of their pieces if any document was split."""
    return f"{records:,} documents" + (f" in {pieces:,} pieces" if pieces > records else "")


@dataclass
class DataReport:
    """Counts of a source's records and documents. `read` = `kept` + `skipped` + `without_target`."""

    source: str
    form: str = ""  # the recognised format of another project's columns; "" for our own columns
    read: int = 0
    kept: int = 0
    skipped: int = 0  # records with an error; `reasons` has the first few errors
    without_target: int = 0  # records without a target token, maybe because they were cut
    cut_documents: int = 0  # documents shortened to the limit
    cut_tokens: int = 0  # tokens lost by shortening
    split_documents: int = 0  # texts split into pieces, without a loss of tokens
    documents: int = 0  # each piece counts as one
    records: int = 0  # each record counts once, even if it has several pieces
    tokens: int = 0
    target_tokens: int = 0
    joined_turns: int = 0  # turns whose first token also contains characters of the prompt
    trained_ends: list[int] = field(default_factory=list)  # ids of the tokens that teach the student to stop
    trained_share: float | None = None  # only for a weighted source: its share of all tokens
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def total(cls, reports: Sequence["DataReport"]) -> "DataReport":
        """The sum of the counts of several sources."""
        total = cls(" + ".join(report.source for report in reports))
        for report in reports:
            for name, value in asdict(report).items():
                if name not in ("source", "form", "trained_share"):
                    setattr(total, name, getattr(total, name) + value)
        return total

    def counted(self, sources: Iterable[str], tokens: int, target_tokens: int) -> "DataReport":
        """Replace the counts of documents, tokens and targets. sources: `file:line` of each document."""
        sources = list(sources)
        records = len({_PIECE.sub("", source) for source in sources})
        return replace(self, documents=len(sources), records=records, tokens=tokens, target_tokens=int(target_tokens))

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            (True, f"{documents_in_words(self.records, self.documents)}, {self.tokens:,} tokens"),
            (self.target_tokens, f"{self.target_tokens:,} to predict"),
            (self.cut_documents, f"{self.cut_documents:,} cut at the limit ({self.cut_tokens:,} tokens lost)"),
            (self.without_target, f"{self.without_target:,} dropped with nothing to predict"),
            (self.joined_turns, f"{self.joined_turns:,} turns begin within a token of their prompt"),
            (self.trained_share is not None, f"{self.trained_share or 0:.1%} of the tokens to train on"),
            (self.form, self.form),
            (self.skipped, f"{self.skipped:,} skipped, the first: {''.join(self.reasons[:1])}"),
        ]
        return escaped(f"{self.source}: {', '.join(text for is_shown, text in parts if is_shown)}")


#: the warnings by kind; the kinds "thought", "changed" and "key" are kinds of lost texts (`written_texts.py`)
_WARNINGS = {
    "mark": (
        f"its text has {MARK}, and the record has no image, so that {MARK} is read as text; expected a column images "
        "if it marks the place of one"
    ),
    "thought": (
        "the chat template does not write {what}, so the student does not learn it. Templates of reasoning models "
        "leave out the thoughts of turns before the last question, and read only one name of the key with thoughts. "
        "To train on the thoughts, set a template that writes them (data.chat_template), or give one record for each "
        "turn, as 'prompt' and 'completion'"
    ),
    "changed": "the chat template does not write {what} as it is, but with changes inside the text",
    "key": "the chat template does not write {what}, so the student does not see it",
    "space": (
        "the prompt ends with a space. This tokenizer joins a space with the next word, so the first tokens of the "
        "completion differ from the tokens of the same text in one piece, which models were trained on; expected no "
        "space at the end of prompts and of the chat template's generation prompt (data.chat_template), and "
        "completions that begin with the space"
    ),
}


class TextFindings:
    """Counts the records of a source that need a warning, and collects the tokens that teach the student to stop.

    end_ids: the end-of-sequence ids of tokenizer and student. The student learns to stop wherever such a token is a
        target, and from the special token with which the template ends the assistant's last turn (`Rendered.end`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Targets, end_ids: Collection[int]):
        self._tokenizer, self._targets, self._end_ids = tokenizer, targets, sorted(end_ids)
        self._special = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._counts, self._first = Counter[str](), dict[str, tuple[str, str]]()
        self.trained_ends: set[int] = set()

    def add(self, rendered: Rendered, where: str) -> None:
        """where: `file:line` of the record."""
        findings = dict(rendered.lost)
        body, prompt = rendered.body, rendered.prompt
        if MARK in prompt + body and (rendered.encoded is None or not rendered.encoded.media):
            findings["mark"] = ""
        if self._targets == "none":
            has_space = (body or prompt).endswith(" ")
        else:
            has_space = prompt.endswith(" ") or any(body[begin - 1] == " " for begin, _ in rendered.spans if begin)
        if has_space:
            findings["space"] = ""
        for kind, what in findings.items():
            self._counts[kind] += 1
            self._first.setdefault(kind, (where, what))

    def add_ends(self, encoded: Encoded, kept: int, end: str) -> None:
        """kept: the number of tokens of the document that are kept. end: see `Rendered`."""
        ids_T = encoded.ids[:kept][encoded.targets[:kept]]
        ends = [*self._end_ids, *([self._special[end]] if end in self._special else [])]
        self.trained_ends.update(ids_T[np.isin(ids_T, ends)].tolist())

    def warnings(self, source: str) -> list[str]:
        lines, first = [], dict(self._first)
        if self._targets != "none" and self._end_ids and not self.trained_ends:
            ends = self._tokenizer.convert_ids_to_tokens(self._end_ids)
            lines.append(
                f"{source}: no token that ends a text is a target (the student's: {name_list(ends)}), so it does not "
                "learn to stop (the chat template ends turns without a special token, its {% generation %} blocks "
                "leave it out, or the limit cuts every document)"
            )
        if "space" in first:
            joined, space, letter = tokenize(self._tokenizer, ["a a", "a ", "a"], special=False)
            if joined == space + letter:  # the tokenizer does not join spaces
                del first["space"]
        for kind, text in _WARNINGS.items():
            if kind in first:
                where, what = first[kind]
                count = self._counts[kind]
                lines.append(f"{where}: {text.replace('{what}', what)} (such records: {count:,})")
        return lines
