"""What a run with a teacher of another tokenizer needs (`teacher.cross_tokenizer`), and what it refuses."""

from functools import partial

from stillhouse.config import ConfigError, RunConfig
from stillhouse.data import load_tokenizer
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.teachers.cross_tokenizer import CrossTokenizerStore
from stillhouse.teachers.in_job import TeacherInJob
from stillhouse.teachers.spec import SignalSpec
from stillhouse.train.build import load_teacher, model_fingerprints, teacher_is_base

KEY = "teacher.cross_tokenizer"


def open_cross_tokenizer(config: RunConfig) -> CrossTokenizerStore:
    """The store of the signals. The teacher itself is loaded later, where it is needed (`TeacherInJob.start`).

    Raises ConfigError for tokenizers that cannot be aligned, and for settings that do not go together.
    """
    student, teacher = config.student, config.teacher
    assert teacher is not None
    assert teacher.model is not None
    assert teacher.cross_tokenizer is not None
    if teacher_is_base(config):
        raise ConfigError(
            KEY,
            f"got {teacher.cross_tokenizer} for a teacher that is the student without its adapter, and has its "
            "tokenizer: expected null",
        )
    own = load_tokenizer(student.model, student.revision, student.trust_remote_code)
    other = load_tokenizer(teacher.model, teacher.revision, teacher.trust_remote_code)
    if teacher.top_k > len(other):
        raise ConfigError(
            "teacher.top_k", f"got {teacher.top_k}, expected at most {len(other)}, the tokens of the teacher"
        )
    signal = SignalSpec("top_k", "float32", teacher.top_k, config.objective.temperature, with_label=True)
    in_job = TeacherInJob(
        teacher.model,
        model_fingerprints(config)["teacher"],
        signal,
        partial(load_teacher, config),
        config.train.micro_batch_tokens,
    )
    try:
        return CrossTokenizerStore(in_job, own, other, teacher.cross_tokenizer)
    except ValueError as error:
        raise ConfigError(KEY, str(error)) from error


def require_objective(config: RunConfig, spec: ObjectiveSpec) -> None:
    """Raise ConfigError if `uld` is without `teacher.cross_tokenizer`, or another divergence is with it."""
    method = None if config.teacher is None else config.teacher.cross_tokenizer
    loss = config.objective.loss
    if spec.uld is not None and method != "uld":
        raise ConfigError("objective.loss", f"got {loss!r}: uld needs {KEY}=uld")
    if method != "uld":
        return
    if spec.divergence is not None:
        raise ConfigError(
            "objective.loss",
            f"got {loss!r} with {KEY}=uld, which gives no divergence: expected uld, such as "
            f"0.5*cross_entropy + 0.5*uld, or {KEY}=gold",
        )
    if config.data.eval and config.checkpoint.best not in ("eval/cross_entropy", None):
        raise ConfigError(
            "checkpoint.best", f"got {config.checkpoint.best} with {KEY}=uld: expected eval/cross_entropy or null"
        )
