"""Loads the tokenizers and the data of a run, before the models."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
    StudentConfig,
    TeacherConfig,
    TeachersConfig,
    as_config_error,
)
from stillhouse.data import Documents, LoadOptions, NoSourceError, PackedSequences, load_documents
from stillhouse.data.media import MediaInputs, MediaProcessor, find_media_processor, media_kind
from stillhouse.data.render.record_forms import are_conversations
from stillhouse.data.render.reply_format import reply_format
from stillhouse.data.render.teacher_substitutions import PrefixTemplate, TeacherMedia
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
    for name, named in config.several.items():
        with as_config_error(f"teachers.{name}.prefix"):
            PrefixTemplate(name, named.prefix or "")  # raises ValueError for a malformed prefix
    template = config.data.chat_template
    tokenizer, warnings = load_tokenizers(config.student, config.teacher_sections, template, stores)
    is_set = template is not None
    processor = _media_processor("student", config.student, tokenizer, config.data, template_is_set=is_set)
    route = None if config.teachers is None else config.teachers.route
    in_job = {section: teacher for section, teacher in config.teacher_sections.items() if section not in stores}
    readers: dict[str, TeacherMedia] = {}
    for section, teacher in in_job.items() if processor is not None else ():
        if teacher.model is not None and not teacher.is_base_of(config.student):
            assert processor is not None
            other = _media_processor(section, teacher, processor.tokenizer, config.data, template_is_set=True)
            reader = TeacherMedia(section, processor, other, is_routed=route is not None)
            readers[section.partition(".")[2]] = reader
    splits = _load_splits(config, tokenizer, processor, readers, fits_teachers=fits_teachers)
    train, held_out = splits["train"], splits.get("eval")
    for documents in splits.values():
        warnings = warnings + documents.report.warnings
    hashes = {which: documents.fingerprint() for which, documents in splits.items()}
    media_inputs, processors = None, dict[str, str]()
    if processor is not None and any(documents.media is not None for documents in splits.values()):
        media_kind(processor).require_support(config)
        media_inputs, processors = _media_inputs(processor, readers, splits.values())
        readers = {name: reader for name, reader in readers.items() if not reader.is_shared}
        # the tensors depend on it
        identity = [processor.identity(), *([name, reader.identity()] for name, reader in readers.items())]
        hashes = {which: json_hash([digest, identity]) for which, digest in hashes.items()}
    if held_out is not None and (shared := held_out.overlap(train)):
        warnings.append(
            f"{shared:,} of the {len(held_out):,} held-out documents are also in the training data: "
            "held-out metrics will look better than they are"
        )
    # packed rows have gaps for what teachers in this job read; with rollouts, weights are shares of the prompts
    weights = [source.weight for source in config.data.weighted_sources] if config.rollout is None else []
    packed = partial(
        PackedSequences,
        max_tokens=config.data.max_tokens,
        seed=config.seed,
        gaps=[section.partition(".")[2] for section in in_job] if fits_teachers else [],
        together=route,
        media_inputs=media_inputs,
    )
    return Data(
        tokenizer,
        packed(train, shuffle=True, weights=weights or None),
        None if held_out is None else packed(held_out, shuffle=False),
        hashes,
        warnings,
        splits.get("dataset"),
        processor,
        readers if media_inputs is not None else {},
        processors,
    )


def _load_splits(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
    readers: Mapping[str, TeacherMedia],
    *,
    fits_teachers: bool,
) -> dict[str, Documents]:
    """The documents by split: train, eval if there are held-out ones, dataset if rollouts take a share from it."""
    sections = config.data, config.objective, tokenizer, config.teachers
    source_tools = _proven_tools(config.rollouts, config.rollout_key, tokenizer, processor)
    options: dict[str, Any] = {"processor": processor, "readers": readers, "fits_teachers": fits_teachers}
    options["tools"] = tool_schemas(config.rollout)
    options["end_ids"] = end_ids_of(config.student)
    train, held_out = load_data(*sections, config.rollouts, source_tools=source_tools, **options)
    dataset = None
    if any(are_used := [not rollout.is_on_student_alone for rollout in config.rollouts]):
        used = list(compress(config.data.weighted_sources, are_used))
        data = config.data.model_copy(update={"train": used}) if used else config.data
        dataset, _ = load_data(data, *sections[1:], source_tools=list(compress(source_tools, are_used)), **options)
    route = None if config.teachers is None else config.teachers.route
    if route is not None and (unused := [name for name in config.several if name not in train.columns[route]]):
        raise ConfigError(
            f"teachers.{unused[0]}", f"no document of data.train has {unused[0]!r} in its column '{route}'"
        )
    splits = {"train": train, "dataset": dataset, "eval": held_out}
    return {which: documents for which, documents in splits.items() if documents is not None}


def _proven_tools(
    rollouts: Sequence[RolloutConfig],
    rollout_key: Callable[[int, str], str],
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> list[ToolSchemas]:
    """The schemas of the tools of each source of prompts. rollout_key: see `RunConfig.rollout_key`

    Raises ConfigError for tools that cannot be used, and for a chat template whose calls cannot be parsed, or which
    cannot write the replies of environments as turns.
    """
    by_paths: dict[tuple[str, ...], ToolSchemas] = {}
    for number, rollout in enumerate(rollouts):
        if (paths := tuple(rollout.tool_paths)) not in by_paths:
            key = rollout_key(number, "tools")
            by_paths[paths] = schemas = tool_schemas(rollout, key)
            if schemas is not None:
                with as_config_error(key):
                    tool_format(tokenizer, schemas, processor)
    for number, rollout in enumerate(rollouts):
        if (role := rollout.reply_role) is not None:
            with as_config_error(rollout_key(number, "reply")):
                reply_format(tokenizer, role, processor)
    return [by_paths[tuple(rollout.tool_paths)] for rollout in rollouts]


def _media_inputs(
    processor: MediaProcessor, readers: Mapping[str, TeacherMedia], splits: Collection[Documents]
) -> tuple[MediaInputs, dict[str, str]]:
    """The inputs from media, and a hash of each model's processor of media, by the models' sections."""
    for documents in splits:
        processor.check_texts(documents)
    teachers, identities = dict[str, MediaInputs | None](), {"student": processor.identity()}
    for name, reader in readers.items():
        if not reader.is_shared:
            teachers[name] = None if reader.processor is None else MediaInputs(reader.processor)
            identities |= {reader.section: parts} if (parts := reader.identity()) else {}
    hashes = {section: json_hash(parts) for section, parts in identities.items()}
    return MediaInputs(processor, teachers=teachers), hashes


def _media_processor(
    section: str,
    model: StudentConfig | TeacherConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    template_is_set: bool,
) -> MediaProcessor | None:
    """A model's processor of media; None if it has none. template_is_set: whether another chat template is used"""
    with as_config_error(f"{section}.model"):
        return find_media_processor(
            str(model.model),
            tokenizer,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            most_pixels=data.image_pixels,
            template_is_set=template_is_set,
        )


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

    def load(key: str, source: str, schemas: ToolSchemas, rollout: RolloutConfig | None = None) -> Documents:
        options = _load_options(data, objective, teachers, rollout)
        options = replace(options, fits_teachers=fits_teachers, tools=schemas, end_ids=end_ids)
        try:
            documents = load_documents(source, tokenizer, options, cache, processor, readers)
        except NoSourceError as error:
            raise ConfigError(key, str(error)) from error
        if rollout is not None and rollout.reply_role and not are_conversations(documents.records[0], tokenizer):
            raise ConfigError(
                "rollout.reply",
                f"got {rollout.reply}, but the prompts of {source} are strings: expected raw, or conversations "
                "('messages', or 'prompt' as a list of messages)",
            )
        return documents

    def load_train(rollouts: Sequence[RolloutConfig] = ()) -> Documents:
        paths = [item.source for item in data.weighted_sources] or [str(data.train)]
        none: list[None] = [None] * len(paths)
        sources = zip(paths, source_tools or none, rollouts or none, strict=True)
        loaded = {path: load("data.train", path, schemas, rollout) for path, schemas, rollout in sources}
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
