"""How many records of a data source were used, cut or skipped."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stillhouse.display import escaped

_PIECE = re.compile(r" \(piece \d+ of \d+\)$")


def piece_source(where: str, number: int, count: int) -> str:
    """The source of piece `number` (from 0) of the record at `where`, which has `count` pieces."""
    return f"{where} (piece {number + 1} of {count})" if count > 1 else where


def documents_in_words(records: int, pieces: int) -> str:
    """The number of documents, and of the pieces into which they are split, if they are."""
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
    joined_turns: int = 0  # turns whose first token also has characters of the prompt
    trained_ends: list[int] = field(default_factory=list)  # ids of the tokens that teach the student to stop
    trained_share: float | None = None  # the share of all trained tokens, only for a weighted source
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

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return asdict(self)

    def summary(self) -> str:
        """One line for the log, without the counts that are zero."""
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

    def why_empty(self, max_tokens: int) -> str:
        """Why a source has no document to train on. max_tokens: the limit of a document."""
        if not self.read:
            return f"{self.source}: the dataset is empty"
        text = f"{self.source}: nothing to train on; of {self.read} records {self.skipped} were skipped"
        if self.without_target:
            text += (
                f" and {self.without_target} have no token to predict (no completion or assistant turn "
                f"within max_tokens={max_tokens}; {self.cut_documents} were cut there)"
            )
        return text + "".join(f"\n  {reason}" for reason in self.reasons)
