"""Loads the tokenizers and the data, which a run needs before its models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
)
from stillhouse.data import (
    Documents,
    NoSourceError,
    PackedSequences,
    check_same_tokenizer,
    load_documents,
    load_tokenizer,
)
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.data.render.prefix_templates import PrefixTemplate
from stillhouse.data.token_cache import user_folder
from stillhouse.libraries import reading
from stillhouse.models.files import require_model_folder
from stillhouse.signals import CrossTokenizerStore, SignalStore


@dataclass(frozen=True)
class RunData:
    """A run's tokenizer and packed data.

    train: with rollouts, the prompts; their documents have no targets. dataset: with rollouts, the documents with
    completions, if a share of each step is the dataset's. evaluation: None if the configuration asks for no held-out
    data. hashes: a hash of each split's documents.
    """

    tokenizer: PreTrainedTokenizerBase
    train: PackedSequences
    evaluation: PackedSequences | None
    hashes: dict[str, str]
    warnings: list[str]
    dataset: Documents | None = None


def load_run_data(config: RunConfig, stores: Mapping[str, SignalStore]) -> RunData:
    """Load tokenizers and data. stores: of the teachers' signals, by the keys of their sections (`open_stores`).

    Raises ConfigError for a mistake in the configuration, ValueError for one in the data or the tokenizers.
    """
    _require_prefixes(config)
    tokenizer, warnings = load_tokenizers(config, stores)
    train, held_out = load_data(config.data, config.objective, tokenizer, config.teachers, config.rollout)
    dataset = None
    if config.rollout is not None and not config.rollout.is_on_student_alone:
        dataset, _ = load_data(config.data, config.objective, tokenizer, config.teachers)
    if config.teachers is not None and config.teachers.route is not None:
        route = config.teachers.route
        for name in (each for each in config.several if each not in train.columns[route]):
            raise ConfigError(f"teachers.{name}", f"no document of data.train has {name!r} in its column '{route}'")
    all_splits = {"train": train, "dataset": dataset, "eval": held_out}
    splits = {which: documents for which, documents in all_splits.items() if documents is not None}
    for documents in splits.values():
        warnings = warnings + documents.report.warnings
    if held_out is not None and (shared := held_out.overlap(train)):
        warnings.append(
            f"{shared:,} of the {len(held_out):,} held-out documents are also in the training data: "
            "held-out metrics will look better than they are"
        )

    def pack(documents: Documents, *, shuffle: bool) -> PackedSequences:
        return PackedSequences(
            documents,
            max_tokens=config.data.max_tokens,
            seed=config.seed,
            shuffle=shuffle,
            gaps=_with_gaps(config),
            together=None if config.teachers is None else config.teachers.route,
            weights=[each.weight for each in config.data.mixture] if shuffle and config.data.mixture else None,
        )

    return RunData(
        tokenizer,
        pack(train, shuffle=True),
        None if held_out is None else pack(held_out, shuffle=False),
        {which: documents.fingerprint() for which, documents in splits.items()},
        warnings,
        dataset,
    )


def load_tokenizers(
    config: RunConfig, stores: Mapping[str, SignalStore]
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """The student's tokenizer, and warnings. Raises ValueError if a teacher's tokenizer is a different one.

    If a store of signals has no tokenizer, there is nothing to compare here.
    """
    student, warnings = config.student, list[str]()
    tokenizer = _tokenizer_of("student", student)
    if config.data.chat_template is not None:
        try:
            tokenizer.chat_template = _chat_template(config.data.chat_template)
            _require_rendering(tokenizer, config.data.chat_template)
        except ValueError as error:
            raise ConfigError("data.chat_template", str(error)) from error
    for section, teacher in config.teacher_sections.items():
        store = stores.get(section)
        if isinstance(store, CrossTokenizerStore):
            warnings += store.warnings
            continue
        if store is not None:
            if store.teacher_folder is None:
                continue
            other = load_tokenizer(str(store.teacher_folder))
        elif teacher.model is not None:
            other = _tokenizer_of(section, teacher)
        else:  # the student itself
            continue
        try:
            warnings += check_same_tokenizer(tokenizer, other)
        except ValueError as error:
            if store is not None:
                raise
            approximate = f"or set {section}.cross_tokenizer to gold or uld, which are approximations"
            raise ValueError(f"{error}, {approximate}") from error
        if teacher.url is not None:
            _require_same_conversation(tokenizer, other, teacher.accept, f"{section}.accept")
    return tokenizer, warnings


def _tokenizer_of(section: str, model: StudentConfig | TeacherConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Raises ConfigError, with the model's key, if there is none."""
    try:
        require_model_folder(str(model.model))
        return load_tokenizer(str(model.model), model.revision, model.trust_remote_code)
    except ValueError as error:
        raise ConfigError(f"{section}.model", str(error)) from error


def _chat_template(source: str) -> str | dict[str, str]:
    """The text of a file, or the chat template of a tokenizer. Raises ValueError if there is none."""
    path = Path(source)
    template: str | dict[str, str] | None
    if path.is_file():
        with reading(f"{source} cannot be read"):
            template = path.read_text(encoding="utf-8")
    elif path.suffix in (".jinja", ".jinja2", ".j2", ".txt"):
        raise ValueError(f"got {source}, but there is no such file")
    else:
        require_model_folder(source)
        template = load_tokenizer(source).chat_template
    if not template:
        raise ValueError(f"got {source}, which has no chat template: expected a Jinja file or a tokenizer with one")
    return template


def _require_rendering(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raise ValueError unless a conversation can be rendered, in a process with limits: a template is code."""
    conversation = {"messages": [{"role": "user", "content": "a"}]}
    with reading(f"got {source}"):
        ChatTemplate(tokenizer, ("messages",), "all").render(conversation)


def _require_same_conversation(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, accepted: Sequence[str], key: str
) -> None:
    """Raise ConfigError if the teacher was made for another chat template or another end of sequence.

    Such a teacher answers, but as to a text that it has never seen. accepted: the differences that are wanted, under
    this key of the configuration.
    """
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


def _require_prefixes(config: RunConfig) -> None:
    """Raise ConfigError for a prefix that cannot be filled from columns."""
    for name, each in config.several.items():
        try:
            PrefixTemplate(name, each.prefix or "")
        except ValueError as error:
            raise ConfigError(f"teachers.{name}.prefix", str(error)) from error


def _with_gaps(config: RunConfig) -> list[str]:
    """The teachers that read the student's rows and a prefix, which needs room in the sequences."""
    return [
        name
        for name, each in config.several.items()
        if each.prefix is not None and each.url is None and each.cross_tokenizer is None
    ]


def load_data(
    data: DataConfig,
    objective: ObjectiveConfig,
    tokenizer: PreTrainedTokenizerBase,
    teachers: TeachersConfig | None = None,
    rollout: RolloutConfig | None = None,
) -> tuple[Documents, Documents | None]:
    """The training documents and the held-out documents (None if the configuration asks for none).

    teachers: the column that names a document's teacher and the teachers' prefixes are read, too. rollout: the
    training documents are prompts, with their records. The same records are held out as without it.
    """
    route = None if teachers is None else teachers.route
    prefixes = {} if teachers is None else {name: each.prefix for name, each in teachers.named.items() if each.prefix}

    def load(key: str, source: str, prompts_of: RolloutConfig | None = None) -> Documents:
        try:
            return load_source(source, prompts_of)
        except NoSourceError as error:
            share = " (a share is written as a number, such as 0.05)" if source.endswith("%") else ""
            raise ConfigError(key, f"{error}{share}") from error

    def load_source(source: str, prompts_of: RolloutConfig | None) -> Documents:
        return load_documents(
            source,
            tokenizer,
            max_tokens=data.max_tokens - (0 if prompts_of is None else prompts_of.max_new_tokens),
            tokens=objective.tokens,
            on_error=data.on_error,
            columns=() if route is None else (route,),
            allowed={} if route is None or teachers is None else {route: list(teachers.named)},
            prefixes=prefixes,
            reader=route,
            prompts=prompts_of is not None,
            keep_records=prompts_of is not None,
            cache=user_folder() if data.cache == "auto" else None if data.cache is None else Path(data.cache),
        )

    def split(documents: Documents, share: float) -> tuple[Documents, Documents]:
        try:
            train, held_out = documents.split(share)
        except ValueError as error:
            raise ConfigError("data.eval", str(error)) from error
        for source, report in train.reports.items():
            if not report.documents:
                raise ConfigError(
                    "data.eval",
                    f"got {share:g}, which holds out all {documents.reports[source].documents:,} documents of "
                    f"{source}: expected a smaller share, a source of its own for the evaluation, or a larger source",
                )
        return train, held_out

    mixture = {each.source: load("data.train", each.source, rollout) for each in data.mixture}
    train = Documents.joined(mixture) if mixture else load("data.train", str(data.train), rollout)
    if data.eval_sets:
        sets = {name: load(f"data.eval.{name}", source) for name, source in data.eval_sets.items()}
        return train, Documents.joined(sets)
    if isinstance(data.eval, str):
        return train, load("data.eval", data.eval)
    assert isinstance(data.eval, float)
    if not data.eval:
        return train, None
    if rollout is None:
        return split(train, data.eval)
    try:
        whole = load("data.train", str(data.train))
    except ValueError as error:
        raise ConfigError(
            "data.eval",
            f"got {data.eval:g}, but held-out metrics need completions: expected 0 for prompts alone, or a source"
            f" with completions ({error})",
        ) from error
    return split(train, data.eval)[0], split(whole, data.eval)[1]
