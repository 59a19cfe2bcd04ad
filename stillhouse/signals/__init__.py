"""Sources of the teacher's signals (see `signal_source.py`)."""

from stillhouse.signals.cache import SignalCache
from stillhouse.signals.chosen import ChosenTeacher
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.in_job import TeacherInJob
from stillhouse.signals.in_stage import InStageTeacher, SelfTeacher
from stillhouse.signals.separate import SeparateTeacher
from stillhouse.signals.several_teachers import SeveralTeachers
from stillhouse.signals.signal_source import (
    NoTeacher,
    PendingSignals,
    ReadySignals,
    SignalSource,
    request_ahead,
)
from stillhouse.signals.signal_spec import SignalSpec
from stillhouse.signals.stored import SignalsLostError, SignalStore, StoredTeacher
from stillhouse.signals.weight_average import WeightAverage

__all__ = [
    "ChosenTeacher",
    "CrossTokenizerStore",
    "InStageTeacher",
    "NoTeacher",
    "PendingSignals",
    "ReadySignals",
    "SelfTeacher",
    "SeparateTeacher",
    "SeveralTeachers",
    "SignalCache",
    "SignalSource",
    "SignalSpec",
    "SignalStore",
    "SignalsLostError",
    "StoredTeacher",
    "TeacherInJob",
    "WeightAverage",
    "request_ahead",
]
