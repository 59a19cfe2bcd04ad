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


@dataclass
class DataReport:
    """How many records were used, cut or skipped: `read` = `kept` + `skipped` + `without_target`."""

    source: str
    form: str = ""  # how columns of another project were read; "" for our own columns
    read: int = 0
    kept: int = 0
    skipped: int = 0  # records that could not be used; `reasons` has the errors of the first few
    without_target: int = 0  # records without a target token, maybe because the end was cut off
    cut_documents: int = 0  # documents shortened to the limit
    cut_tokens: int = 0  # tokens lost by shortening
    split_documents: int = 0  # texts cut into pieces, without loss
    documents: int = 0  # each piece counts as one
    records: int = 0  # each record counts once, however many pieces it has
    tokens: int = 0
    target_tokens: int = 0
    joined_turns: int = 0  # turns whose first token begins in the prompt, as the tokenizer joins the two
    trained_share: float | None = None  # of a weighted source: its part of all tokens that the run trains on
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def total(cls, reports: Sequence["DataReport"]) -> "DataReport":
        """The counts of several sources together."""
        total = cls(" + ".join(report.source for report in reports))
        for report in reports:
            for name, value in asdict(report).items():
                if name not in ("source", "form", "trained_share"):
                    setattr(total, name, getattr(total, name) + value)
        return total

    def counted(self, sources: Iterable[str], tokens: int, target_tokens: int) -> "DataReport":
        """The report with new counts of documents, tokens and targets. sources: of the documents or their pieces."""
        sources = list(sources)
        records = len({_PIECE.sub("", source) for source in sources})
        return replace(self, documents=len(sources), records=records, tokens=tokens, target_tokens=int(target_tokens))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def summary(self) -> str:
        """One line for the reader of a log; counts that are zero are left out."""
        pieces = f" in {self.documents:,} pieces" if self.documents > self.records else ""
        parts = [f"{self.records:,} documents{pieces}", f"{self.tokens:,} tokens"]
        if self.target_tokens:
            parts.append(f"{self.target_tokens:,} to predict")
        if self.cut_documents:
            parts.append(f"{self.cut_documents:,} cut at the limit ({self.cut_tokens:,} tokens lost)")
        if self.without_target:
            parts.append(f"{self.without_target:,} dropped with nothing to predict")
        if self.joined_turns:
            parts.append(f"{self.joined_turns:,} turns begin within a token of their prompt")
        if self.trained_share is not None:
            parts.append(f"{self.trained_share:.1%} of the tokens to train on")
        if self.form:
            parts.append(self.form)
        if self.skipped:
            parts.append(f"{self.skipped:,} skipped, the first: {self.reasons[0]}")
        return escaped(f"{self.source}: {', '.join(parts)}")

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
