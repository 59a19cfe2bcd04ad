"""Sources of the teacher's signals (see `source.py`)."""

from stillhouse.teachers.cache import CachedTeacher, SignalCache
from stillhouse.teachers.in_stage import InStageTeacher, NoTeacher
from stillhouse.teachers.separate import SeparateTeacher
from stillhouse.teachers.source import PendingSignals, ReadySignals, SignalSource, request_ahead

__all__ = [
    "CachedTeacher",
    "InStageTeacher",
    "NoTeacher",
    "PendingSignals",
    "ReadySignals",
    "SeparateTeacher",
    "SignalCache",
    "SignalSource",
    "request_ahead",
]
