"""Loads the tokenizers and the data, which a run needs before its models."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, DataConfig, ObjectiveConfig, RunConfig
from stillhouse.data import (
    Documents,
    PackedSequences,
    check_same_tokenizer,
    load_documents,
    load_tokenizer,
)
from stillhouse.teachers import CrossTokenizerStore, SignalStore


@dataclass(frozen=True)
class RunData:
    """A run's tokenizer and packed data.

    evaluation: None if the configuration asks for no held-out data. hashes: a hash of each split's documents.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PackedSequences
    evaluation: PackedSequences | None
    hashes: dict[str, str]
    warnings: list[str]


def load_run_data(config: RunConfig, store: SignalStore | None = None) -> RunData:
    """Load tokenizers and data. store: of the teacher's signals, if the teacher does not run in this job.

    Raises ConfigError for a mistake in the configuration, ValueError for one in the data or the tokenizers.
    """
    tokenizer, warnings = load_tokenizers(config, store)
    train, held_out = load_data(config.data, config.objective, tokenizer)
    splits = {"train": train} | ({} if held_out is None else {"eval": held_out})
    for documents in splits.values():
        warnings = warnings + documents.report.warnings
    if held_out is not None and (shared := held_out.overlap(train)):
        warnings.append(
            f"{shared:,} of the {len(held_out):,} held-out documents are also in the training data: "
            "held-out metrics will look better than they are"
        )
    max_tokens, seed = config.data.max_tokens, config.seed
    return RunData(
        tokenizer,
        PackedSequences(train, max_tokens=max_tokens, seed=seed),
        None if held_out is None else PackedSequences(held_out, max_tokens=max_tokens, seed=seed, shuffle=False),
        {which: documents.fingerprint() for which, documents in splits.items()},
        warnings,
    )


def load_tokenizers(config: RunConfig, store: SignalStore | None = None) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The student's tokenizer, and warnings. Raises ValueError if the teacher's tokenizer is a different one.

    If a store of signals has no tokenizer, there is nothing to compare here.
    """
    student, teacher = config.student, config.teacher
    tokenizer = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    if teacher is None:
        return tokenizer, []
    if store is None:
        assert teacher.model is not None
        other = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
        try:
            return tokenizer, check_same_tokenizer(tokenizer, other)
        except ValueError as error:
            approximate = "or set teacher.cross_tokenizer to gold or uld, which are approximations"
            raise ValueError(f"{error}, {approximate}") from error
    if isinstance(store, CrossTokenizerStore):
        return tokenizer, store.warnings
    if store.teacher_folder is None:
        return tokenizer, []
    other = load_tokenizer(str(store.teacher_folder))
    warnings = check_same_tokenizer(tokenizer, other)
    if teacher.url is not None:
        _require_same_conversation(tokenizer, other, teacher.accept)
    return tokenizer, warnings


def _require_same_conversation(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, accepted: Sequence[str]
) -> None:
    """Raise ConfigError if the teacher was made for another chat template or another end of sequence.

    Such a teacher answers, but as to a text that it has never seen. accepted: the differences that are wanted.
    """
    key = "teacher.accept"
    if "eos" not in accepted and student.eos_token != teacher.eos_token:
        raise ConfigError(
            key,
            f"the end-of-sequence token is {student.eos_token!r} for the student and {teacher.eos_token!r} for the "
            "teacher: expected the same one, or eos in this list if the difference is meant",
        )
    templates = [each.chat_template for each in (student, teacher)]
    if "chat_template" not in accepted and None not in templates and templates[0] != templates[1]:
        raise ConfigError(
            key,
            "student and teacher have different chat templates, and the data is written with the student's: expected "
            "the same template, or chat_template in this list if the difference is meant",
        )


def load_data(
    data: DataConfig, objective: ObjectiveConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[Documents, Documents | None]:
    """The training documents and the held-out documents (None if the configuration asks for none)."""

    def load(source: str) -> Documents:
        return load_documents(
            source, tokenizer, max_tokens=data.max_tokens, tokens=objective.tokens, on_error=data.on_error
        )

    train = load(data.train)
    if isinstance(data.eval, str):
        return train, load(data.eval)
    try:
        return train.split(data.eval) if data.eval else (train, None)
    except ValueError as error:
        raise ConfigError("data.eval", str(error)) from error
