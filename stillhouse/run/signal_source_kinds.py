"""The sources of a teacher's signals in this job or on its disks, as entries of the group `stillhouse.sources`."""

from typing import Any

from stillhouse.config.signal_source_kind import WEIGHT_KEYS, SourceKind


class _Model(SourceKind):
    def source(self, sources: Any, section: str, teacher: Any, head: Any) -> Any:
        return sources.model(section, teacher, head)


class _Student(SourceKind):
    def source(self, sources: Any, section: str, teacher: Any, head: Any) -> Any:
        from stillhouse.signals import SelfTeacher

        average = sources.average if teacher.student == "ema" else None
        return SelfTeacher(sources.student, sources.autocast, average)


class _Cache(SourceKind):
    def open(self, section: str, teacher: Any, objective: Any, batch_tokens: int) -> Any:
        from pathlib import Path

        from stillhouse.config import as_config_error
        from stillhouse.signals import SignalCache

        with as_config_error(f"{section}.cache"):
            return SignalCache(Path(teacher.cache))


class _CrossTokenizer(SourceKind):
    def open(self, section: str, teacher: Any, objective: Any, batch_tokens: int) -> Any:
        from stillhouse.run.teachers import open_cross_tokenizer

        return open_cross_tokenizer(section, teacher, objective, batch_tokens)


MODEL = _Model("model", "{}", is_store=False, beside=WEIGHT_KEYS, any_tokens=True, compares_tokenizer=True)
STUDENT = _Student(
    "student",
    "the student itself",
    is_store=False,
    because="the student's value is used",
    options=("ema_decay",),
    any_tokens=True,
    compares_tokenizer=True,
)
CACHE = _Cache(
    "cache", "cache {}", beside=("attention", "revision", "trust_remote_code", "dtype"), compares_tokenizer=True
)
CROSS_TOKENIZER = _CrossTokenizer(
    "cross_tokenizer", "{}", needs_model=True, beside=WEIGHT_KEYS, options=("top_k",), any_tokens=True
)
