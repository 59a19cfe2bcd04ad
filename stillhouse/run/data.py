"""Loads the tokenizers and the data of a run, before the models, and compares the teachers' tokenizers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from stillhouse.config import (
    ConfigError,
    DataConfig,
    RolloutConfig,
    RunConfig,
    StudentConfig,
    TeacherConfig,
    as_config_error,
)
from stillhouse.config.model_folder import require_model_folder, require_template
from stillhouse.data import (
    Documents,
    LoadOptions,
    NoSourceError,
    PackedSequences,
    check_same_tokenizer,
    load_documents,
    load_tokenizer,
)
from stillhouse.data.media import MediaInputs, MediaProcessor, find_media_processor, media_kind
from stillhouse.data.record import TemplateSyntaxError
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.record_forms import are_conversations
from stillhouse.data.render.teacher_substitutions import PrefixTemplate, TeacherMedia
from stillhouse.data.token_cache import user_folder
from stillhouse.display import first_line
from stillhouse.hashing import json_hash
from stillhouse.libraries import reading
from stillhouse.loops.session import Data
from stillhouse.models import read_end_ids
from stillhouse.run.local_checks import held_out_needs_completions
from stillhouse.signals import SignalStore
from stillhouse.user_code.environment import environment_of

#: the end of the warning about held-out documents that are also in the training data
OVERLAP = "held-out metrics will look better than they are"
#: the schemas of tools, or None without tools
ToolSchemas = Sequence[dict[str, Any]] | None


def load_run_data(config: RunConfig, stores: Mapping[str, SignalStore], *, fits_teachers: bool = True) -> Data:
    """Load the tokenizers and the data of a run.

    stores: the signal stores, by the keys of the teachers' sections.
    fits_teachers: whether packed sequences have room for the texts of teachers in this job, which can be longer than
        the student's. It is false for a cache, because its teacher reads the documents in other batches.

    Raises ConfigError for a mistake in the configuration, ValueError for a mistake in the data or the tokenizers.
    """
    data, sections = config.data, config.teacher_sections
    for name, named in config.several.items():
        with as_config_error(f"teachers.{name}.prefix"):
            PrefixTemplate(name, named.prefix or "")  # raises ValueError for a malformed prefix
    tokenizer, warnings = _load_tokenizers(config.student, sections, data.chat_template, stores)
    in_job = {section: teacher for section, teacher in sections.items() if section not in stores}
    is_routed = config.teachers is not None and config.teachers.route is not None
    processor, readers = _media_readers(data, config.student, in_job, tokenizer, is_routed=is_routed)
    source_tools = [
        _proven_tools(rollout, partial(config.rollout_key, number), tokenizer, processor)
        for number, rollout in enumerate(config.rollouts)
    ]
    options = _load_options(config, fits_teachers=fits_teachers)
    splits = _Loader(data, options, tokenizer, processor, readers).splits(config.rollouts, source_tools)
    train, held_out = splits["train"], splits.get("eval")
    hashes = {which: documents.fingerprint() for which, documents in splits.items()}
    media_inputs, processors = None, dict[str, str]()
    if processor is not None and any(documents.media is not None for documents in splits.values()):
        media_kind(processor).require_support(config)
        media_inputs, processors, identity = _media_inputs(processor, readers, splits.values())
        # the tensors of media depend on the processors
        hashes = {which: json_hash([digest, identity]) for which, digest in hashes.items()}
        readers = {name: reader for name, reader in readers.items() if not reader.is_shared}
    warnings += [warning for documents in splits.values() for warning in documents.report.warnings]
    if held_out is not None and (shared := held_out.overlap(train)):
        warnings.append(
            f"{shared:,} of the {len(held_out):,} held-out documents are also in the training data: " + OVERLAP
        )
    # gaps are room for the longer texts of teachers in this job. With rollouts, weights select prompts, not sequences
    gaps = [section.partition(".")[2] for section in in_job] if fits_teachers else []
    weights = [source.weight for source in data.weighted_sources] if config.rollout is None else []
    pack = partial(
        PackedSequences,
        max_tokens=data.max_tokens,
        seed=config.seed,
        gaps=gaps,
        together=options.reader,
        media_inputs=media_inputs,
    )
    return Data(
        tokenizer=tokenizer,
        train=pack(train, weights=weights or None),
        evaluation=None if held_out is None else pack(held_out, shuffle=False),
        hashes=hashes,
        warnings=warnings,
        dataset=splits.get("dataset"),
        processor=processor,
        teacher_media=readers if media_inputs is not None else {},
        processors=processors,
        columns=data.columns or {},
    )


def _media_readers(
    data: DataConfig,
    student: StudentConfig,
    in_job: Mapping[str, TeacherConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_routed: bool,
) -> tuple[MediaProcessor | None, dict[str, TeacherMedia]]:
    """Return the student's processor of media, or None, and the media readers of teachers in this job, by name."""
    has_template = data.chat_template is not None
    processor = _media_processor("student", student, tokenizer, data, template_is_set=has_template)
    readers: dict[str, TeacherMedia] = {}
    for section, teacher in in_job.items():
        if processor is not None and teacher.model is not None and not teacher.is_base_of(student):
            other = _media_processor(section, teacher, processor.tokenizer, data, template_is_set=True)
            readers[section.partition(".")[2]] = TeacherMedia(section, processor, other, is_routed=is_routed)
    return processor, readers


def _load_options(config: RunConfig, *, fits_teachers: bool) -> LoadOptions:
    """Return the options for documents with completions. fits_teachers: see `load_run_data`."""
    student = config.student
    with as_config_error("student.model"):
        end_ids = read_end_ids(student.model, student.revision, trust_remote_code=student.trust_remote_code)
    environment = None if config.rollout is None else environment_of(config.rollout)
    route = None if config.teachers is None else config.teachers.route
    return LoadOptions(
        max_tokens=config.data.max_tokens,
        tokens=config.objective.tokens,
        turns=config.data.turns,
        column_names=config.data.columns or {},
        on_error=config.data.on_error,
        columns=() if route is None else (route,),
        allowed={} if route is None else {route: list(config.several)},
        prefixes={name: teacher.prefix for name, teacher in config.several.items() if teacher.prefix},
        reader=route,
        fits_teachers=fits_teachers,
        tools=None if environment is None else environment.schemas,
        end_ids=end_ids,
    )


@dataclass(frozen=True)
class _Loader:
    """Loads documents. options: the options for documents of data.eval. See `load_documents` for all other fields."""

    data: DataConfig
    options: LoadOptions
    tokenizer: PreTrainedTokenizerBase
    processor: MediaProcessor | None
    readers: Mapping[str, TeacherMedia]

    def splits(self, rollouts: Sequence[RolloutConfig], tools: Sequence[ToolSchemas]) -> dict[str, Documents]:
        """Return the documents by split: train, eval if documents are held out, dataset if rollout.share is below 1.

        rollouts: the section rollout for each source of prompts; empty if the training documents have completions.
        tools: the tools' schemas for each source.
        """
        weighted, share = self.data.weighted_sources, self.data.eval
        paths = [item.source for item in weighted] or [str(self.data.train)]
        none = [None] * len(paths)
        sources = list(zip(paths, tools or none, strict=True))
        train = self._train([(*source, rollout) for source, rollout in zip(sources, rollouts or none, strict=True)])
        splits = {"train": train}
        if isinstance(share, dict):
            sets = {name: self._load(f"data.eval.{name}", source, self.options) for name, source in share.items()}
            splits["eval"] = Documents.joined(sets)
        elif isinstance(share, str):
            splits["eval"] = self._load("data.eval", share, self.options)
        elif share:
            documents = train
            if rollouts:
                with held_out_needs_completions(share):
                    documents = self._train([(*source, None) for source in sources])
            splits["train"], held_out = _split(train, share)
            splits["eval"] = _split(documents, share)[1] if rollouts else held_out
        used = list(compress(sources, (not rollout.is_on_student_alone for rollout in rollouts)))
        if used:
            dataset = self._train([(*source, None) for source in used])
            splits["dataset"] = _split(dataset, share)[0] if isinstance(share, float) and share else dataset
        for route, names in self.options.allowed.items():
            named = splits["train"].columns[route]
            if unused := [name for name in names if name not in named]:
                problem = f"no document of data.train has {unused[0]!r} in its column '{route}'"
                raise ConfigError(f"teachers.{unused[0]}", problem)
        return {which: splits[which] for which in ("train", "dataset", "eval") if which in splits}

    def _train(self, sources: Sequence[tuple[str, ToolSchemas, RolloutConfig | None]]) -> Documents:
        """Load documents of data.train. From a source with a section rollout, only prompts and records are loaded."""
        loaded: dict[str, Documents] = {}
        by_path = {source.source: source for source in self.data.weighted_sources}
        for path, tools, rollout in sources:
            options = replace(self.options, tools=tools)
            if (source := by_path.get(path)) is not None:
                names = options.column_names if source.columns is None else source.columns
                options = replace(options, column_names=names, turns=source.turns or options.turns)
            if rollout is not None:
                room = options.max_tokens - rollout.max_new_tokens
                options = replace(options, max_tokens=room, prompts=True, keep_records=True)
            loaded[path] = documents = self._load("data.train", path, options)
            if rollout is None or rollout.reply_role is None:
                continue
            if not are_conversations(documents.records[0], self.tokenizer, options.column_names):
                raise ConfigError(
                    "rollout.reply",
                    f"got {rollout.reply}, but the prompts of {path} are strings: expected raw, or conversations "
                    "('messages', or 'prompt' as a list of messages)",
                )
        return Documents.joined(loaded) if self.data.weighted_sources else next(iter(loaded.values()))

    def _load(self, key: str, source: str, options: LoadOptions) -> Documents:
        folder = self.data.cache
        cache = user_folder() if folder == "auto" else None if folder is None else Path(folder)
        try:
            return load_documents(source, self.tokenizer, options, cache, self.processor, self.readers)
        except NoSourceError as error:
            raise ConfigError(key, str(error)) from error


def _split(documents: Documents, share: float) -> tuple[Documents, Documents]:
    """Return (train, evaluation). Raises ConfigError if all documents of a source would be held out."""
    with as_config_error("data.eval"):
        train, held_out = documents.split(share)
    for source, report in train.reports.items():
        if not report.documents:
            raise ConfigError(
                "data.eval",
                f"got {share:g}, which holds out all {documents.reports[source].documents:,} documents of "
                f"{source}: expected a smaller share, a separate source in data.eval, or a larger source",
            )
    return train, held_out


def _proven_tools(
    rollout: RolloutConfig,
    full_key: Callable[[str], str],
    tokenizer: PreTrainedTokenizerBase,
    processor: MediaProcessor | None,
) -> ToolSchemas:
    """Return the schemas of the tools of one source of prompts.

    full_key: a function from a key of rollout to the full key that sets it for this source.

    Raises ConfigError if the tools cannot be used, if calls in the format of the chat template cannot be parsed, or
    if the template cannot write the replies of environments as turns.
    """
    if (environment := environment_of(rollout, full_key)) is None:
        return None
    with as_config_error(environment.format_key):
        environment.markers(tokenizer, processor)
    return environment.schemas


def _media_processor(
    section: str,
    model: StudentConfig | TeacherConfig,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    template_is_set: bool,
) -> MediaProcessor | None:
    """Return a model's processor of media, or None. template_is_set: see `find_media_processor`."""
    with as_config_error(f"{section}.model"):
        return find_media_processor(
            str(model.model),
            tokenizer,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
            most_pixels=data.image_pixels,
            template_is_set=template_is_set,
        )


def _media_inputs(
    processor: MediaProcessor, readers: Mapping[str, TeacherMedia], splits: Collection[Documents]
) -> tuple[MediaInputs, dict[str, str], list[Any]]:
    """Return the `MediaInputs`, the processors' hashes by section, and one identity of all processors."""
    for documents in splits:
        processor.check_texts(documents)
    teachers, identities = dict[str, MediaInputs | None](), {"student": processor.identity()}
    identity: list[Any] = [processor.identity()]
    for name, reader in readers.items():
        if not reader.is_shared:
            teachers[name] = None if reader.processor is None else MediaInputs(reader.processor)
            parts = reader.identity()
            identities |= {reader.section: parts} if parts else {}
            identity.append([name, parts])
    hashes = {section: json_hash(parts) for section, parts in identities.items()}
    return MediaInputs(processor, teachers=teachers), hashes, identity


def _load_tokenizers(
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    chat_template: str | None,
    stores: Mapping[str, SignalStore],
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Load the student's tokenizer, and return it with warnings.

    teachers, stores: the sections and signal stores of the teachers, by the keys of the sections.

    Raises ValueError if a teacher has another tokenizer. A store without a tokenizer is not compared.
    """
    tokenizer, warnings = _tokenizer("student", student), list[str]()
    if chat_template is not None:
        with as_config_error("data.chat_template"):
            _set_chat_template(tokenizer, chat_template)
    for section, teacher in teachers.items():
        store = stores.get(section)
        warnings += [] if store is None else store.warnings
        if store is not None and store.teacher_folder is not None:
            other = load_tokenizer(str(store.teacher_folder))
        elif store is None and teacher.model is not None:
            other = _tokenizer(section, teacher)
        else:  # the teacher is the student itself, or its store has no tokenizer
            continue
        try:
            warnings += check_same_tokenizer(tokenizer, other)
        except ValueError as error:
            if store is not None:
                raise
            approximate = f"or set {section}.cross_tokenizer to gold, which is an approximation"
            raise ValueError(f"{error}, {approximate}") from error
        if store is not None and store.same_conversation:
            _require_same_conversation(tokenizer, other, teacher.accept, f"{section}.accept")
    return tokenizer, warnings


def _tokenizer(section: str, model: StudentConfig | TeacherConfig) -> PreTrainedTokenizerBase:
    with as_config_error(f"{section}.model"):
        require_model_folder(str(model.model))
        return load_tokenizer(str(model.model), model.revision, model.trust_remote_code)


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Set the chat template of a tokenizer.

    source: a file with a template, or the folder or hub id of a tokenizer.

    Raises ValueError if there is no template, or if the template cannot render a conversation.
    """
    require_template(source)
    template: str | dict[str, str] | None
    if Path(source).is_file():
        with reading(f"{source} cannot be read"):
            template = Path(source).read_text(encoding="utf-8")
    else:
        template = load_tokenizer(source).chat_template
    if not template:
        raise ValueError(f"got {source}, which has no chat template: expected a Jinja file or a tokenizer with one")
    tokenizer.chat_template = template
    try:
        ChatTemplate(tokenizer, ("messages",), "all").render({"messages": [{"role": "user", "content": "a"}]})
    except TemplateSyntaxError as error:
        raise ValueError(f"got {source}, a chat template that {error.problem}") from error
    except ValueError as error:
        raise ValueError(f"got {source}: {first_line(error)}") from error


def _require_same_conversation(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, accepted: Sequence[str], key: str
) -> None:
    """Raise ConfigError if student and teacher have different chat templates or end-of-sequence tokens.

    The teacher would then score conversations in a format on which it was not trained.

    accepted: the differences that the user allows; it is the value of `key` in the configuration.
    """
    if "eos" not in accepted and student.eos_token != teacher.eos_token:
        raise ConfigError(
            key,
            f"the end-of-sequence token is {student.eos_token!r} for the student and {teacher.eos_token!r} for the "
            "teacher: expected the same token, or eos in this list to accept the difference",
        )
    templates = [student.chat_template, teacher.chat_template]
    if "chat_template" not in accepted and None not in templates and templates[0] != templates[1]:
        raise ConfigError(
            key,
            "student and teacher have different chat templates, and the data is written with the student's: expected "
            "the same template, or chat_template in this list to accept the difference",
        )
