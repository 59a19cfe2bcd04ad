"""The part of `rules.py` about the student: its first weights, and which of them are trained."""

from stillhouse.config.rule import Rule, excludes

RULES_OF_STUDENT: tuple[Rule, ...] = (
    # the student's first weights
    excludes("student.init", "student.adapter", because="an adapter needs its base's own weights"),
    excludes("student.init", "student.mtp", because="a run with MTP layers begins with the student of one without"),
    Rule(
        ("student.init.from", "teacher"),
        lambda source, teacher: source == "teacher" and (teacher is None or teacher.model is None),
        "random, or teacher.model, the teacher's files",
    ),
    excludes(
        "student.init.from=teacher",
        "teacher.cross_tokenizer",
        expected="random",
        because="the teacher's embedding is of other tokens",
    ),
    # the student's trained parts
    excludes("student.train", "student.adapter", because="only the adapter is trained"),
    Rule(
        ("student.quantize", "student.adapter"),
        lambda kind, adapter: kind is not None and adapter is None,
        "null, or student.adapter",
        "rounded weights cannot be trained",
    ),
    excludes("student.train", "student.mtp"),
)
