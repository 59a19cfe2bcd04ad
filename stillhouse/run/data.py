"""Loads the tokenizers and the data of a run, before the models."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.config import (
    ConfigError,
    DataConfig,
    ObjectiveConfig,
    RolloutConfig,
    RunConfig,
    TeachersConfig,
    as_config_error,
)
from stillhouse.data import (
    Documents,
    LoadOptions,
    NoSourceError,
    PackedSequences,
    load_documents,
)
from stillhouse.data.media import MediaProcessor, find_media_processor, media_kind
from stillhouse.data.render.media_inputs import MediaInputs
from stillhouse.data.render.prefix_templates import PrefixTemplate
from stillhouse.data.render.record_forms import are_conversations
from stillhouse.data.render.reply_format import reply_format
from stillhouse.data.render.teacher_media import TeacherMedia
from stillhouse.data.render.tool_format import tool_format
from stillhouse.data.token_cache import user_folder
from stillhouse.hashing import json_hash
from stillhouse.loops.session import Data
from stillhouse.rollout.user_functions import tool_schemas
from stillhouse.run.tokenizers import end_ids_of, load_tokenizers
from stillhouse.signals import SignalStore

#: the schemas of tools, or None without tools
ToolSchemas = Sequence[dict[str, Any]] | None


def load_run_data(config: RunConfig, stores: Mapping[str, SignalStore], *, fits_teachers: bool = True) -> Data:
    """Load the tokenizers and the data of a run.

    stores: the signal stores, by the keys of the teachers' sections
    fits_teachers: whether sequences have room for what teachers in this job read; otherwise, they read documents by
        themselves

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or the tokenizers.
    """
    for name, teacher in config.several.items():
        with as_config_error(f"teachers.{name}.prefix"):
            PrefixTemplate(name, teacher.prefix or "")  # raises ValueError for a malformed prefix
    chat_template = config.data.chat_template
    tokenizer, warnings = load_tokenizers(config.student, config.teacher_sections, chat_template, stores)
    processor = _processor(config, tokenizer)
    readers = {} if processor is None else _teacher_media(config, processor, stores)
    sections = config.data, config.objective, tokenizer, config.teachers
    source_tools = _proven_tools(config, tokenizer, processor)
    _prove_replies(config, tokenizer, processor)
    options: dict[str, Any] = {"processor": processor, "readers": readers, "fits_teachers": fits_teachers}
    options["tools"] = tool_schemas(config.rollout)
    options["end_ids"] = end_ids_of(config.student)
    train, held_out = load_data(*sections, config.rollouts, source_tools=source_tools, **options)
    dataset = None
    if not all(rollout.is_on_student_alone for rollout in config.rollouts):
        of_dataset = [not rollout.is_on_student_alone for rollout in config.rollouts]
        source_tools = list(compress(source_tools, of_dataset))
        data = _of_sources(config.data, of_dataset)
        dataset, _ = load_data(data, *sections[1:], source_tools=source_tools, **options)
    route = None if config.teachers is None else config.teachers.route
    if route is not None and (unused := [name for name in config.several if name not in train.columns[route]]):
        raise ConfigError(
            f"teachers.{unused[0]}", f"no document of data.train has {unused[0]!r} in its column '{route}'"
        )
    all_splits = {"train": train, "dataset": dataset, "eval": held_out}
    splits = {which: documents for which, documents in all_splits.items() if documents is not None}
    for documents in splits.values():
        warnings = warnings + documents.report.warnings
    hashes = {which: documents.fingerprint() for which, documents in splits.items()}
    media_inputs, readers = _media_inputs(config, processor, readers, splits.values())
    if processor is not None and media_inputs is not None:
        # the tensors depend on it
        identity = [processor.identity(), *([name, reader.identity()] for name, reader in readers.items())]
        hashes = {which: json_hash([digest, identity]) for which, digest in hashes.items()}
    if held_out is not None and (shared := held_out.overlap(train)):
        warnings.append(
            f"{shared:,} of the {len(held_out):,} held-out documents are also in the training data: "
            "held-out metrics will look better than they are"
        )
    gaps = _teachers_in_job(config, stores) if fits_teachers else []
    return Data(
        tokenizer,
        _packed(config, train, gaps, media_inputs, shuffle=True),
        None if held_out is None else _packed(config, held_out, gaps, media_inputs, shuffle=False),
        hashes,
        warnings,
        dataset,
        processor,
        readers,
        {} if media_inputs is None else _processor_hashes(processor, readers),
    )


def _proven_tools(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None
) -> list[ToolSchemas]:
    """The schemas of the tools of each source of prompts.

    Raises ConfigError for tools that cannot be used, and for a chat template whose calls cannot be parsed.
    """
    by_paths: dict[tuple[str, ...], ToolSchemas] = {}
    for number, rollout in enumerate(config.rollouts):
        if (paths := tuple(rollout.tool_paths)) in by_paths:
            continue
        key = config.rollout_key(number, "tools")
        by_paths[paths] = schemas = tool_schemas(rollout, key)
        if schemas is not None:
            with as_config_error(key):
                tool_format(tokenizer, schemas, processor)
    return [by_paths[tuple(rollout.tool_paths)] for rollout in config.rollouts]


def _prove_replies(config: RunConfig, tokenizer: PreTrainedTokenizerBase, processor: MediaProcessor | None) -> None:
    """Raise ConfigError for a chat template that cannot write the replies of environments as turns."""
    for number, rollout in enumerate(config.rollouts):
        if (role := rollout.reply_role) is not None:
            with as_config_error(config.rollout_key(number, "reply")):
                reply_format(tokenizer, role, processor)


def _packed(
    config: RunConfig, documents: Documents, gaps: Sequence[str], media_inputs: MediaInputs | None, *, shuffle: bool
) -> PackedSequences:
    """gaps: the names of teachers for whose tokens sequences have room"""
    # with rollouts, weights are shares of the prompts
    weights = [source.weight for source in config.data.weighted_sources] if config.rollout is None else []
    return PackedSequences(
        documents,
        max_tokens=config.data.max_tokens,
        seed=config.seed,
        shuffle=shuffle,
        gaps=gaps,
        together=None if config.teachers is None else config.teachers.route,
        weights=weights or None if shuffle else None,
        media_inputs=media_inputs,
    )


def _media_inputs(
    config: RunConfig,
    processor: MediaProcessor | None,
    readers: Mapping[str, TeacherMedia],
    splits: Collection[Documents],
) -> tuple[MediaInputs | None, dict[str, TeacherMedia]]:
    """The inputs from media (None without media), and the readers that do not share the student's processor."""
    if processor is None or all(documents.media is None for documents in splits):
        return None, {}
    media_kind(processor).require_support(config)
    for documents in splits:
        processor.check_texts(documents)
    readers = {name: reader for name, reader in readers.items() if not reader.is_shared}
    of_teachers = {
        name: None if reader.processor is None else MediaInputs(reader.processor) for name, reader in readers.items()
    }
    return MediaInputs(processor, teachers=of_teachers), readers


def _processor_hashes(student: MediaProcessor | None, readers: Mapping[str, TeacherMedia]) -> dict[str, str]:
    """A hash of each model's processor of media, by the models' sections."""
    identities = {} if student is None else {"student": student.identity()}
    identities |= {reader.section: parts for reader in readers.values() if (parts := reader.identity())}
    return {section: json_hash(parts) for section, parts in identities.items()}


def _processor(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> MediaProcessor | None:
    """The student's processor of media; None if it has none."""
    student = config.student
    with as_config_error("student.model"):
        return find_media_processor(
            str(student.model),
            tokenizer,
            revision=student.revision,
            trust_remote_code=student.trust_remote_code,
            most_pixels=config.data.image_pixels,
            template_is_set=config.data.chat_template is not None,
        )


def _teachers_in_job(config: RunConfig, stores: Mapping[str, SignalStore]) -> list[str]:
    """The names of the teachers in this job. The student's packed rows have gaps for what they read."""
    return [section.partition(".")[2] for section in config.teacher_sections if section not in stores]


def _teacher_media(
    config: RunConfig, student: MediaProcessor, stores: Mapping[str, SignalStore]
) -> dict[str, TeacherMedia]:
    """How the models of teachers in this job read media, by the teachers' names. student: the student's processor"""
    is_routed = config.teachers is not None and config.teachers.route is not None
    readers = {}
    for section, teacher in config.teacher_sections.items():
        if section in stores or teacher.model is None or teacher.is_base_of(config.student):
            continue
        with as_config_error(f"{section}.model"):
            processor = find_media_processor(
                str(teacher.model),
                student.tokenizer,
                revision=teacher.revision,
                trust_remote_code=teacher.trust_remote_code,
                most_pixels=config.data.image_pixels,
                template_is_set=True,  # the student's is used
            )
        readers[section.partition(".")[2]] = TeacherMedia(section, student, processor, is_routed=is_routed)
    return readers


def load_data(
    data: DataConfig,
    objective: ObjectiveConfig,
    tokenizer: PreTrainedTokenizerBase,
    teachers: TeachersConfig | None = None,
    rollouts: Sequence[RolloutConfig] = (),
    processor: MediaProcessor | None = None,
    readers: Mapping[str, TeacherMedia] | None = None,
    *,
    fits_teachers: bool = True,
    tools: ToolSchemas = None,
    source_tools: Sequence[ToolSchemas] = (),
    end_ids: Sequence[int] = (),
) -> tuple[Documents, Documents | None]:
    """Load the training documents, and the held-out documents (None if the configuration has none).

    processor: the student's processor of media; None if the student reads no media
    readers: how teachers in this job read media, by their names. fits_teachers: see `LoadOptions`
    tools: the schemas of the tools with which conversations of data.eval are written; those of the section rollout
    source_tools: those of each training source; empty without rollouts
    end_ids: the student's end-of-sequence ids

    teachers: if given, the column of the route and the teachers' prefixes are read, too
    rollouts: the section rollout for each source; if given, the training documents are prompts with their records,
        and the held-out records stay the same
    """
    cache = user_folder() if data.cache == "auto" else None if data.cache is None else Path(data.cache)

    def load(key: str, source: str, of_source: ToolSchemas, rollout: RolloutConfig | None = None) -> Documents:
        options = _load_options(data, objective, teachers, rollout)
        options = replace(options, fits_teachers=fits_teachers, tools=of_source, end_ids=end_ids)
        try:
            documents = load_documents(source, tokenizer, options, cache, processor, readers)
        except NoSourceError as error:
            raise ConfigError(key, str(error)) from error
        if rollout is not None and rollout.reply_role:
            _require_conversations(documents, source, rollout, tokenizer)
        return documents

    def load_train(rollouts: Sequence[RolloutConfig] = ()) -> Documents:
        paths = [item.source for item in data.weighted_sources] or [str(data.train)]
        none: list[None] = [None] * len(paths)
        of_sources = zip(paths, source_tools or none, rollouts or none, strict=True)
        loaded = {path: load("data.train", path, of_source, rollout) for path, of_source, rollout in of_sources}
        return Documents.joined(loaded) if data.weighted_sources else loaded[str(data.train)]

    train = load_train(rollouts)
    if data.eval_sets:
        sets = {name: load(f"data.eval.{name}", source, tools) for name, source in data.eval_sets.items()}
        return train, Documents.joined(sets)
    if isinstance(data.eval, str):
        return train, load("data.eval", data.eval, tools)
    assert isinstance(data.eval, float)
    if not data.eval:
        return train, None
    if not rollouts:
        return _split(train, data.eval)
    try:
        documents = load_train()
    except ValueError as error:
        raise ConfigError(
            "data.eval",
            f"got {data.eval:g}, but held-out metrics need completions: expected 0 for prompts alone, or a source"
            f" with completions ({error})",
        ) from error
    return _split(train, data.eval)[0], _split(documents, data.eval)[1]


def _require_conversations(
    prompts: Documents, source: str, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ConfigError unless the chat template writes the prompts of a source, as it writes replies."""
    if not are_conversations(prompts.records[0], tokenizer):
        raise ConfigError(
            "rollout.reply",
            f"got {rollout.reply}, but the prompts of {source} are strings: expected raw, or conversations "
            "('messages', or 'prompt' as a list of messages)",
        )


def _load_options(
    data: DataConfig, objective: ObjectiveConfig, teachers: TeachersConfig | None, rollout: RolloutConfig | None
) -> LoadOptions:
    named = {} if teachers is None else teachers.named
    route = None if teachers is None else teachers.route
    return LoadOptions(
        max_tokens=data.max_tokens - (0 if rollout is None else rollout.max_new_tokens),
        tokens=objective.tokens,
        on_error=data.on_error,
        columns=() if route is None else (route,),
        allowed={} if route is None else {route: list(named)},
        prefixes={name: teacher.prefix for name, teacher in named.items() if teacher.prefix},
        reader=route,
        prompts=rollout is not None,
        keep_records=rollout is not None,
    )


def _of_sources(data: DataConfig, are_kept: Sequence[bool]) -> DataConfig:
    """The section with only some of the weighted sources."""
    sources = data.weighted_sources
    return data.model_copy(update={"train": list(compress(sources, are_kept))}) if sources else data


def _split(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """Return (train, evaluation). Raises ConfigError if all documents of a source would be held out."""
    with as_config_error("data.eval"):
        train, held_out = documents.split(share)
    for source, report in train.reports.items():
        if not report.documents:
            raise ConfigError(
                "data.eval",
                f"got {share:g}, which holds out all {documents.reports[source].documents:,} documents of "
                f"{source}: expected a smaller share, a source of its own for the evaluation, or a larger source",
            )
    return train, held_out
