"""Sources of the teacher's signals (see `signal_source.py`)."""

from stillhouse.signals.cache import SignalCache
from stillhouse.signals.cross_tokenizer import CrossTokenizerStore
from stillhouse.signals.in_stage_teachers import InStageTeacher, SelfTeacher, WeightAverage
from stillhouse.signals.scorer import LocalModelStore
from stillhouse.signals.separate_teacher import SeparateTeacher
from stillhouse.signals.signal_source import (
    NoTeacher,
    PendingSignals,
    RequestedSteps,
    SeveralTeachers,
    SignalSource,
)
from stillhouse.signals.signal_spec import SignalSpec
from stillhouse.signals.signal_store import ChosenTeacher, SignalsLostError, SignalStore, StoredTeacher

__all__ = [
    "ChosenTeacher",
    "CrossTokenizerStore",
    "InStageTeacher",
    "LocalModelStore",
    "NoTeacher",
    "PendingSignals",
    "RequestedSteps",
    "SelfTeacher",
    "SeparateTeacher",
    "SeveralTeachers",
    "SignalCache",
    "SignalSource",
    "SignalSpec",
    "SignalStore",
    "SignalsLostError",
    "StoredTeacher",
    "WeightAverage",
]
