"""Sources of the teacher's signals (see `source.py`)."""

from stillhouse.teachers.in_stage import InStageTeacher, NoTeacher
from stillhouse.teachers.separate import SeparateTeacher
from stillhouse.teachers.source import PendingSignals, ReadySignals, SignalSource, request_ahead

__all__ = [
    "InStageTeacher",
    "NoTeacher",
    "PendingSignals",
    "ReadySignals",
    "SeparateTeacher",
    "SignalSource",
    "request_ahead",
]
