"""Where the documents come from and how they are cut."""

from typing import Literal

from pydantic import Field

from stillhouse.config.section import PathText, Section, Share


class DataConfig(Section):
    """Documents with the columns `text`, `prompt` and `completion`, or `messages`."""

    train: PathText = Field(
        description="JSONL or Parquet file, folder or glob of them, saved dataset, or hub id (name:config@split).",
        examples=["data/train.jsonl"],
    )
    eval: PathText | Share = Field(
        default=0.02,
        description="What to evaluate on: a source like train's, or the share of train's documents to hold out,"
        " chosen by a hash of their content. 0: no evaluation.",
    )
    max_tokens: int = Field(
        default=2048,
        ge=2,
        description="Tokens per packed sequence. Longer text is split, longer conversations and completions are cut"
        " at the end and counted.",
    )
    on_error: Literal["raise", "skip"] = Field(
        default="raise", description="A malformed record stops the run (raise), or is left out and counted (skip)."
    )
