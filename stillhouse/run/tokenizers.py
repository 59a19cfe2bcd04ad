"""Loads the tokenizer of a run, and compares those of the teachers with it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from stillhouse.config import ConfigError, StudentConfig, TeacherConfig, as_config_error
from stillhouse.config.model_folder import require_model_folder
from stillhouse.data import check_same_tokenizer, load_tokenizer
from stillhouse.data.record import TemplateSyntaxError
from stillhouse.data.render.chat_template import ChatTemplate
from stillhouse.display import first_line
from stillhouse.libraries import reading
from stillhouse.models import read_end_ids
from stillhouse.signals import SignalStore


def load_tokenizers(
    student: StudentConfig,
    teachers: Mapping[str, TeacherConfig],
    chat_template: str | None,
    stores: Mapping[str, SignalStore],
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Load the student's tokenizer. Returns the tokenizer and warnings.

    teachers, stores: by the keys of the teachers' sections
    Raises ValueError if a teacher has another tokenizer. Stores without a tokenizer are not compared here.
    """
    tokenizer, warnings = _tokenizer_of("student", student), list[str]()
    if chat_template is not None:
        with as_config_error("data.chat_template"):
            _set_chat_template(tokenizer, chat_template)
    for section, teacher in teachers.items():
        store = stores.get(section)
        if store is not None:
            warnings += store.warnings
            if store.teacher_folder is None:
                continue
            other = load_tokenizer(str(store.teacher_folder))
        elif teacher.model is not None:
            other = _tokenizer_of(section, teacher)
        else:  # the teacher is the student itself
            continue
        try:
            warnings += check_same_tokenizer(tokenizer, other)
        except ValueError as error:
            if store is not None:
                raise
            approximate = f"or set {section}.cross_tokenizer to gold or uld, which are approximations"
            raise ValueError(f"{error}, {approximate}") from error
        if store is not None and store.same_conversation:
            _require_same_conversation(tokenizer, other, teacher.accept, f"{section}.accept")
    return tokenizer, warnings


def end_ids_of(student: StudentConfig) -> list[int]:
    """The student's own end-of-sequence ids, beside that of the tokenizer."""
    with as_config_error("student.model"):
        return read_end_ids(student.model, student.revision, trust_remote_code=student.trust_remote_code)


def _tokenizer_of(section: str, model: StudentConfig | TeacherConfig) -> PreTrainedTokenizerBase:
    """Raises ConfigError with the model's key if the model has no tokenizer."""
    with as_config_error(f"{section}.model"):
        require_model_folder(str(model.model))
        return load_tokenizer(str(model.model), model.revision, model.trust_remote_code)


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Set the chat template of a tokenizer. source: a file with a template, or another tokenizer

    Raises ValueError if there is no template, or if the template cannot render a conversation.
    """
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

    The teacher would score conversations in a format on which it was not trained.
    accepted: the differences that the user allows: the value of `key` in the configuration
    """
    if "eos" not in accepted and student.eos_token != teacher.eos_token:
        raise ConfigError(
            key,
            f"the end-of-sequence token is {student.eos_token!r} for the student and {teacher.eos_token!r} for the "
            "teacher: expected the same one, or eos in this list if the difference is meant",
        )
    templates = [student.chat_template, teacher.chat_template]
    if "chat_template" not in accepted and None not in templates and templates[0] != templates[1]:
        raise ConfigError(
            key,
            "student and teacher have different chat templates, and the data is written with the student's: expected "
            "the same template, or chat_template in this list if the difference is meant",
        )
