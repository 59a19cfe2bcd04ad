"""The source of the documents, and their maximum length."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from stillhouse.config.rollout_section import SourceRolloutConfig
from stillhouse.config.section import PathText, Section, Share, Text

#: a valid name of an evaluation set. mtp_1, … are excluded, because metrics of MTP depths contain them
_NAME = re.compile(r"(?!mtp_\d+$)[A-Za-z][A-Za-z0-9_-]*")
#: the names after `eval/` in metrics of all runs; an evaluation set cannot have such a name
_METRICS = {"cross_entropy", "forward_kl", "agreement", "student_entropy", "teacher_entropy", "exact_match"}
_METRICS |= {"teacher_cross_entropy", "tokens", "tasks_truncated"}


def is_source_name(name: str) -> bool:
    """Whether a source can have this name in metrics. "reward" is refused: rollout/reward/… are rewards' metrics."""
    return _NAME.fullmatch(name) is not None and name != "reward"


def _checked_name(name: str) -> str:
    if not is_source_name(name):
        raise ValueError(f"got {name!r}, expected a letter, then letters, digits, _ and -, and not reward")
    return name


def _checked_columns(columns: dict[str, str]) -> dict[str, str]:
    taken = dict[str, str]()
    for name, column in columns.items():
        if name not in COLUMNS:
            known = ", ".join(COLUMNS)
            if column in COLUMNS:
                raise ValueError(f"got {{{name}: {column}}}, expected your column on the right: {{{column}: {name}}}")
            near = get_close_matches(name, COLUMNS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"got the name {name!r}, expected one of {known}{hint}")
        if (other := taken.setdefault(column, name)) != name:
            raise ValueError(f"got the column {column!r} for {other} and for {name}, expected two columns")
    return columns


#: the columns that Stillhouse reads. The first four make a record form, and the last five are those of other projects
COLUMNS: tuple[str, ...] = ("text", "prompt", "completion", "messages", "tools", "images", "image")
COLUMNS += ("conversations", "system", "instruction", "input", "output")
#: the names of columns in the user's files, by the names that Stillhouse reads
Columns = Annotated[dict[str, Text], AfterValidator(_checked_columns)]


class SourceConfig(Section):
    """One source of a mixture, and its share of the tokens or, with rollout, of the prompts."""

    source: PathText = Field(examples=["data/train.jsonl"])
    """A source in the same form as a single source of data.train."""
    weight: float = Field(default=1.0, gt=0)
    """The weight of the source. Its share is the weight divided by the sum of all weights."""
    name: Annotated[str, AfterValidator(_checked_name)] | None = None
    """The name of the source in metrics, with rollout. null: the name of its file or folder, without extension."""
    columns: Columns | None = None
    """The names of this source's columns, in place of data.columns. {}: the names that Stillhouse reads."""
    turns: Literal["all", "last"] | None = None
    """The turns of this source's conversations, in place of data.turns."""
    rollout: SourceRolloutConfig | None = None
    """Keys of the section rollout for the prompts of this source."""

    @property
    def shown_name(self) -> str:
        """The name of the source in metrics."""
        path = self.source.partition("@")[0].rstrip("/")
        last = re.split(r"[/\\:]", path)[-1]
        return self.name or last.partition(".")[0]

    @model_serializer(mode="wrap")
    def _set_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out keys with null, which earlier versions did not have, so that their runs can be resumed."""
        return {key: value for key, value in write(self).items() if value is not None}


def source_prefix(sources: Sequence[SourceConfig], number: int, name: str) -> str:
    """Return `data.train[number].` if this source of prompts sets `rollout.<name>` itself, otherwise "".

    sources: the weighted sources; empty for a single source.
    """
    rollout = sources[number].rollout if sources else None
    return f"data.train[{number}]." if rollout is not None and name in rollout.model_fields_set else ""


def _checked_sources(train: str | list[SourceConfig]) -> str | list[SourceConfig]:
    if train == []:
        raise ValueError("got an empty list: expected one source or more")
    sources = [part.source for part in train if isinstance(part, SourceConfig)]
    if len(set(sources)) < len(sources):
        raise ValueError("got a source twice: expected each source once, with its whole weight")
    return train


def _checked_sets(sets: str | float | dict[str, str]) -> str | float | dict[str, str]:
    if sets == {}:
        raise ValueError("got no sets: expected at least one name with a source, or 0 for no held-out documents")
    for name in sets if isinstance(sets, dict) else ():
        if not _NAME.fullmatch(name) or name in _METRICS:
            raise ValueError(
                f"got the name {name!r}: expected a letter, then letters, digits, _ and -, and not the name of a"
                " metric or of an MTP depth such as mtp_1"
            )
    return sets


class DataConfig(Section):
    """Documents with the columns `text`, `prompt` and `completion`, or `messages`."""

    train: Annotated[PathText | list[SourceConfig], AfterValidator(_checked_sources)] = Field(
        examples=["data/train.jsonl"]
    )
    """JSONL, JSON, CSV or Parquet file, folder or glob of such files, saved dataset, or hub id (name:config@split). A
    mixture is a list of {source, weight}; the weights set the shares of the tokens or, with rollout, of the prompts.
    With rollout, a source may also have a name and its own keys of rollout: {source, weight, name, rollout: {…}}."""
    eval: Annotated[PathText | Share | dict[str, PathText], AfterValidator(_checked_sets)] = 0.02
    """Held-out documents: a source as in train, or the share of train's documents that are held out; a hash of their
    content chooses them. 0: no held-out documents. {name: source, …}: several sets; each set also has its own
    metrics, such as eval/name/cross_entropy."""
    columns: Columns | None = Field(default=None, examples=[{"prompt": "question", "completion": "answer"}])
    """The names of columns in your files, by the names that Stillhouse reads: text, prompt, completion, messages,
    tools, images, image, and those of ShareGPT and Alpaca (conversations, system, instruction, input, output). They
    hold for data.train, data.eval and eval.prompts.data. A source in a list in data.train can have its own columns.
    Rewards and teachers.route read the records under the names in the files. null: no other names."""
    turns: Literal["all", "last"] = "all"
    """The turns of the assistant that are targets. all: all turns of a conversation or completion. last: only the
    last message, which must be the assistant's; earlier turns are context as the chat template writes it. Templates
    of reasoning models write earlier turns without their thoughts. No effect on records of strings."""
    max_tokens: int = Field(default=2048, ge=2)
    """The maximum number of tokens of a packed sequence. A longer text is split into several documents; a longer
    conversation or completion is cut at its end, and the cuts are counted."""
    packing: Literal["auto", "packed", "rows"] = "auto"
    """How documents share a forward pass. packed: several documents in a row, separated by position_ids, masks or
    lengths. rows: one document in a row, for models that cannot run packed documents, such as state-space models;
    micro-batches then have documents of similar lengths. auto: packed if a test at load shows that packing is exact
    for this model, otherwise rows."""
    chat_template: PathText | None = Field(default=None, examples=["template.jinja"])
    """Chat template for conversations: a Jinja file, or a folder or hub id whose tokenizer has it, such as the
    teacher's. The student is saved with this template. null: the template of the student's tokenizer."""
    image_pixels: int | None = Field(default=None, ge=1, examples=[1048576])
    """The most pixels (width × height) of an image. A larger image is scaled down before it goes to the model's
    processor, which has its own limits. null: only the processor's limits."""
    cache: PathText | None = Field(default=None, examples=["auto"])
    """Folder for tokenized data. The next start with the same files, tokenizer and options maps the data into
    memory from this folder, so that the data may be larger than the memory. auto: stillhouse/data in the user's cache
    folder. null: no folder. No effect on hub ids and on the prompts of rollout."""
    on_error: Literal["raise", "skip"] = "raise"
    """The treatment of a malformed record. raise: the run stops. skip: the record is left out and counted."""

    @property
    def turns_in_words(self) -> str:
        """The assistant's turns that are targets, for the objective in words."""
        turns = {source.turns or self.turns for source in self.weighted_sources} or {self.turns}
        if turns == {"all"}:
            return "assistant turns"
        return "the last turn of conversations" if turns == {"last"} else "assistant turns (in some sources the last)"

    @property
    def weighted_sources(self) -> list[SourceConfig]:
        """The sources with weights; empty if data.train is a single source."""
        return [] if isinstance(self.train, str) else self.train

    @property
    def eval_sets(self) -> dict[str, str]:
        """The sources of several evaluation sets, by name; empty if data.eval is not a mapping."""
        return self.eval if isinstance(self.eval, dict) else {}
