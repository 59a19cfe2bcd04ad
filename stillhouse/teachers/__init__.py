"""Sources of the teacher's signals (see `source.py`)."""

from stillhouse.teachers.cache import SignalCache
from stillhouse.teachers.chosen import ChosenTeacher
from stillhouse.teachers.client import RemoteSignals
from stillhouse.teachers.cross_tokenizer import CrossTokenizerStore
from stillhouse.teachers.in_job import TeacherInJob
from stillhouse.teachers.in_stage import InStageTeacher, NoTeacher
from stillhouse.teachers.self_teacher import SelfTeacher
from stillhouse.teachers.separate import SeparateTeacher
from stillhouse.teachers.several import SeveralTeachers
from stillhouse.teachers.source import PendingSignals, ReadySignals, SignalSource, request_ahead
from stillhouse.teachers.spec import SignalSpec
from stillhouse.teachers.stored import SignalsLostError, SignalStore, StoredTeacher
from stillhouse.teachers.weight_average import WeightAverage

__all__ = [
    "ChosenTeacher",
    "CrossTokenizerStore",
    "InStageTeacher",
    "NoTeacher",
    "PendingSignals",
    "ReadySignals",
    "RemoteSignals",
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
