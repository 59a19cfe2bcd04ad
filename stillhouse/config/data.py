"""The source of the documents, and their maximum length."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import PathText, Section, Share


class DataConfig(Section):
    """Documents with the columns `text`, `prompt` and `completion`, or `messages`."""

    train: PathText = Field(
        description="JSONL or Parquet file, folder or glob of such files, saved dataset, or hub id"
        " (name:config@split).",
        examples=["data/train.jsonl"],
    )
    eval: PathText | Share = Field(
        default=0.02,
        description="Held-out documents: a source of the same kinds as train, or the share of train's documents to"
        " hold out, chosen by a hash of their content. 0: no evaluation.",
    )
    max_tokens: int = Field(
        default=2048,
        ge=2,
        description="Tokens per packed sequence. A longer text is split into several documents; a longer conversation"
        " or completion is cut at its end, and the cuts are counted.",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise", description="raise: a malformed record stops the run. skip: it is left out and counted."
    )
