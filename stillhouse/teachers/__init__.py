"""Teachers: what turns a batch into a signal."""

from stillhouse.teachers.local import LocalTeacher, Teacher

__all__ = ["LocalTeacher", "Teacher"]
