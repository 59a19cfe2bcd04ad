"""What a run with a teacher of another tokenizer needs (`teacher.cross_tokenizer`), and what it refuses."""

from functools import partial

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import load_tokenizer
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.run.models import load_model, model_fingerprints, teacher_is_base
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.in_job import TeacherInJob
from stillhouse.signals.signal_spec import SignalSpec


def open_cross_tokenizer(config: RunConfig, section: str, temperature: float) -> CrossTokenizerStore:
    """The store of a teacher's signals. The teacher itself is loaded later, where it is needed.

    section: the key of the teacher's section. Raises ConfigError for tokenizers that cannot be aligned, and for
    settings that do not go together.
    """
    student, teacher = config.student, config.teacher_sections[section]
    assert teacher.model is not None
    assert teacher.cross_tokenizer is not None
    key = f"{section}.cross_tokenizer"
    if section == "teacher" and teacher_is_base(config):
        raise ConfigError(
            key,
            f"got {teacher.cross_tokenizer} for a teacher that is the student without its adapter, and has its "
            "tokenizer: expected null",
        )
    own = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    other = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
    if teacher.top_k > len(other):
        raise ConfigError(
            f"{section}.top_k", f"got {teacher.top_k}, expected at most {len(other)}, the tokens of the teacher"
        )
    in_job = TeacherInJob(
        teacher.model,
        model_fingerprints(config, {})[section],
        SignalSpec("top_k", "float32", teacher.top_k, temperature, with_label=True),
        partial(load_model, section, teacher.model, teacher),
        config.train.micro_batch_tokens,
    )
    try:
        return CrossTokenizerStore(in_job, own, other, teacher.cross_tokenizer)
    except ValueError as error:
        raise ConfigError(key, str(error)) from error


def require_objective(config: RunConfig, spec: ObjectiveSpec) -> None:
    """Raise ConfigError if `uld` is without `teacher.cross_tokenizer`, or another divergence is with it."""
    key, loss = "teacher.cross_tokenizer", config.objective.loss
    method = None if config.teacher is None else config.teacher.cross_tokenizer
    if spec.uld is not None and method != "uld":
        raise ConfigError("objective.loss", f"got {loss!r}: uld needs {key}=uld")
    if method == "uld" and spec.divergence is not None:
        raise ConfigError(
            "objective.loss",
            f"got {loss!r} with {key}=uld, which gives no divergence: expected uld, such as "
            f"0.5*cross_entropy + 0.5*uld, or {key}=gold",
        )
