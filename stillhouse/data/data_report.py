"""Counts the records of a data source that were used, cut or skipped, and makes warnings about their texts."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from stillhouse.data.read.messages import MARK, has_empty_answer
from stillhouse.data.render.templates import Encoded, Rendered, Targets
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.display import counted, escaped, name_list

#: the end of a document's `file:line` if the document is one piece of a split text
_PIECE = re.compile(r" \(piece \d+ of \d+\)$")
_LATER_PIECE = re.compile(r" \(piece (?!1 )\d+ of \d+\)$")


def documents_in_words(records: int, pieces: int) -> str:
    """The number of documents, and the number of their pieces if any document was split."""
    return counted(records, "document") + (f" in {counted(pieces, 'piece')}" if pieces > records else "")


def duplicates_of(keys_D: np.ndarray, sources: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs: the `file:line` of a record with the content of an earlier record, and that of the earliest one.

    keys_D: the hashes of the documents' records. sources: the `file:line` of each document. D documents.
    """
    _, first_K, key_D = np.unique(keys_D, return_index=True, return_inverse=True)
    earliest_D = first_K[key_D]
    repeated = np.flatnonzero(earliest_D < np.arange(len(keys_D))).tolist()
    pairs = ((sources[document], sources[earliest_D[document]]) for document in repeated)
    return [
        (_PIECE.sub("", source), _PIECE.sub("", earliest))
        for source, earliest in pairs
        if not _LATER_PIECE.search(source)
    ]


@dataclass
class DataReport:
    """Counts of the records and documents of a source. `read` = `kept` + `skipped` + `without_target`."""

    source: str
    form: str = ""  # the recognised format of another project's columns; "" for Stillhouse's columns
    read: int = 0
    kept: int = 0
    skipped: int = 0  # records with an error; `reasons` has the first few errors
    duplicates: int = 0  # used records with the content of an earlier record
    empty_answers: int = 0  # records with an answer without text; they are used
    without_target: int = 0  # records without a target token, maybe because they were cut
    cut_documents: int = 0  # documents shortened to the limit
    cut_tokens: int = 0  # tokens lost by shortening
    split_documents: int = 0  # texts split into pieces, without a loss of tokens
    documents: int = 0  # each piece counts as a document
    records: int = 0  # each record counts once, even if it has several pieces
    tokens: int = 0
    target_tokens: int = 0
    joined_turns: int = 0  # turns whose first token also contains characters of the prompt
    trained_ends: list[int] = field(default_factory=list)  # ids of the tokens that teach the student to stop
    trained_share: float | None = None  # a weighted source's share of all tokens; else None
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
        """A copy with new counts of documents, tokens and targets. sources: `file:line` of each document."""
        sources = list(sources)
        records = len({_PIECE.sub("", source) for source in sources})
        return replace(self, documents=len(sources), records=records, tokens=tokens, target_tokens=int(target_tokens))

    def summary(self) -> str:
        """One line for the log."""
        parts = [
            (True, f"{documents_in_words(self.records, self.documents)}, {self.tokens:,} tokens"),
            (self.target_tokens, f"{self.target_tokens:,} to predict"),
            (self.cut_documents, f"{self.cut_documents:,} cut at the limit ({self.cut_tokens:,} tokens lost)"),
            (self.without_target, f"{self.without_target:,} dropped without a token to predict"),
            (self.duplicates, f"{self.duplicates:,} duplicates"),
            (self.empty_answers, f"{self.empty_answers:,} with an empty answer"),
            (self.joined_turns, f"{self.joined_turns:,} turns whose first token also has text of the prompt"),
            (self.trained_share is not None, f"{self.trained_share or 0:.1%} of the tokens to train on"),
            (self.form, self.form),
            (self.skipped, f"{self.skipped:,} skipped, the first: {''.join(self.reasons[:1])}"),
        ]
        return escaped(f"{self.source}: {', '.join(text for is_shown, text in parts if is_shown)}")


#: the warnings by kind; `Kind` in `written_texts.py` describes the kinds "thought", "changed" and "key"
_WARNINGS = {
    "mark": (
        f"its text has {MARK}, but the record has no image, so {MARK} is read as ordinary text; if it marks the "
        "place of an image, give the image in a column 'images'"
    ),
    "thought": (
        "the chat template does not write {what}, so the student does not learn it. Templates of reasoning models "
        "leave out the thoughts of turns before the last question, and each of them reads thoughts from only one "
        "key, such as 'reasoning_content'. To train on the thoughts, set a template that writes them "
        "(data.chat_template), or give one record for each turn, as 'prompt' and 'completion'"
    ),
    "changed": "the chat template writes {what} with changes inside the text",
    "key": "the chat template does not write {what}, so the student does not see it",
    "duplicate": "it has the same content as {what}, so this content counts more than once",
    "empty": "an answer has no text, so the student learns to end at once; remove the record unless you want this",
    "space": (
        "the prompt ends with a space. This tokenizer joins a space with the next word, but prompts and completions "
        "are tokenized separately. So the completion begins with other tokens than in a whole text, and models were "
        "trained on whole texts; remove the space from the end of the prompts, or of the chat template's generation "
        "prompt (data.chat_template), and begin the completions with it"
    ),
}


class TextFindings:
    """Counts the records of a source that need a warning, and collects the tokens that teach the student to stop.

    end_ids: the end-of-sequence ids of tokenizer and student. The student learns to stop from targets with these ids,
        and from the special token with which the template ends the assistant's last turn (`Rendered.end`).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, targets: Targets, end_ids: Collection[int]):
        self._tokenizer, self._targets, self._end_ids = tokenizer, targets, sorted(end_ids)
        self._special = {
            token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._counts, self._first = Counter[str](), dict[str, tuple[str, str]]()
        self.trained_ends: set[int] = set()

    def add(self, rendered: Rendered, fields: Mapping[str, Any], where: str) -> None:
        """Find the warnings that a record needs, and count them. where: `file:line` of the record."""
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
        if self._targets != "none" and has_empty_answer(fields):
            findings["empty"] = ""
        for kind, what in findings.items():
            self._count(kind, where, what)

    def add_duplicates(self, keys_D: np.ndarray, sources: Sequence[str]) -> None:
        """Find records with the content of an earlier record, and count them. See `duplicates_of`."""
        for where, earliest in duplicates_of(keys_D, sources):
            self._count("duplicate", where, earliest)

    def count(self, kind: str) -> int:
        """The number of records with a warning of this kind."""
        return self._counts[kind]

    def _count(self, kind: str, where: str, what: str) -> None:
        self._counts[kind] += 1
        self._first.setdefault(kind, (where, what))

    def add_ends(self, encoded: Encoded, kept: int, end: str) -> None:
        """Collect targets that teach to stop. kept: the number of tokens before the cut. end: see `Rendered`."""
        ids_T = encoded.ids[:kept][encoded.targets[:kept]]
        ends = [*self._end_ids, *([self._special[end]] if end in self._special else [])]
        self.trained_ends.update(ids_T[np.isin(ids_T, ends)].tolist())

    def warnings(self, source: str) -> list[str]:
        lines, first = [], dict(self._first)
        if self._targets != "none" and self._end_ids and not self.trained_ends:
            ends = self._tokenizer.convert_ids_to_tokens(self._end_ids)
            lines.append(
                f"{source}: no end-of-sequence token of the student ({name_list(ends)}) is a target, so the student "
                "does not learn to stop: the chat template ends turns without a special token, or its "
                "{% generation %} blocks exclude this token, or data.max_tokens cuts every document before it"
            )
        if "space" in first:
            joined, space, letter = tokenize(self._tokenizer, ["a a", "a ", "a"], special=False)
            if joined == space + letter:  # the tokenizer does not join a space with the next word
                del first["space"]
        for kind, text in _WARNINGS.items():
            if kind in first:
                where, what = first[kind]
                count = self._counts[kind]
                lines.append(f"{where}: {text.replace('{what}', what)} (such records: {count:,})")
        return lines
