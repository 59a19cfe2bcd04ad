"""The resolved objective of a run as a sentence: the first line that a run prints."""

from collections.abc import Mapping

from stillhouse.config import RolloutConfig, RunConfig, TeacherConfig, TeachersConfig
from stillhouse.engine.depths import depths_in_words
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.signals import SignalStore


def in_words(config: RunConfig, spec: ObjectiveSpec, stores: Mapping[str, SignalStore]) -> str:
    """The resolved objective as a sentence: the first line that a run prints."""
    teachers, over = "", ""
    if config.teacher is not None and (spec.needs_teacher or config.objective.hidden):
        teachers = f" ← {_teacher_in_words(config.teacher, stores.get('teacher'))}"
        over = f"{_over(config.teacher, stores.get('teacher'))}, "
    elif config.teachers is not None and spec.needs_teacher:
        teachers = f" ← {_several_in_words(config.teachers, spec, stores)}"
    return (
        f"{loss_in_words(config, spec)}, {over}"
        f"temperature {spec.temperature:g}, "
        f"mean over the target tokens of each step{_targets_in_words(config)}: "
        f"{config.student.model}{teachers}"
    )


def loss_in_words(config: RunConfig, spec: ObjectiveSpec) -> str:
    """The beginning of the sentence, which the configuration alone decides."""
    return f"minimise {spec.in_words()}{depths_in_words(config)}{_hidden_in_words(config)}"


def _targets_in_words(config: RunConfig) -> str:
    """Which tokens are targets. Plain texts have no prompts, and all their tokens are."""
    if config.rollout is not None:
        return f" (completions){_written_in_words(config.rollout)}"
    return " (prompts and all else)" if config.objective.tokens == "all" else " (texts, completions)"


def _hidden_in_words(config: RunConfig) -> str:
    return "".join(
        f" + {each.scale:g}*{each.loss} of layers {each.student} and {each.teacher}"
        for each in config.objective.hidden
    )


def _written_in_words(rollout: RolloutConfig) -> str:
    share = "" if rollout.is_on_student_alone else f" ({rollout.share:.0%}; the others are the dataset's)"
    return f", written by the {rollout.writer}{share}, schedule {rollout.schedule}"


def _teacher_in_words(teacher: TeacherConfig, store: SignalStore | None) -> str:
    return str(teacher.model) if store is None else store.name


def _over(teacher: TeacherConfig, store: SignalStore | None) -> str:
    """What a teacher's divergence is taken over."""
    if store is None or store.signal.is_exact:
        return "over the full vocabulary"
    has_no_tail = store.signal.kind == "sampled" or teacher.cross_tokenizer == "uld"
    tail = "" if has_no_tail else f" (tail: {teacher.tail})"
    return f"over {store.signal} of the teacher{tail}"


def _several_in_words(teachers: TeachersConfig, spec: ObjectiveSpec, stores: Mapping[str, SignalStore]) -> str:
    parts = []
    for name, teacher in teachers.named.items():
        share, store = spec.teachers[name], stores.get(f"teachers.{name}")
        what = _teacher_in_words(teacher, store)
        if teacher.student is not None:
            what = (
                "the student" if teacher.student == "live" else f"the student's average (decay {teacher.ema_decay:g})"
            )
        details = [_over(teacher, store)]
        if teacher.prefix is not None:
            details.append("behind a prefix")
        if share.temperature is not None:
            details.append(f"temperature {share.temperature:g}")
        factor = "" if share.weight == 1 else f"{share.weight:.3g} × "
        parts.append(f"{factor}{name}: {what} ({', '.join(details)})")
    how = f"one by column '{teachers.route}'" if teachers.route else f"sum of {teachers.sum}"
    return f"{how} of {'; '.join(parts)}"
