"""Servers as a source of a teacher's signals: an entry of the group `stillhouse.sources`."""

from collections.abc import Iterable
from typing import Any

from stillhouse.config.rule import Rule, excludes
from stillhouse.config.source_kinds import SourceKind


class _Servers(SourceKind):
    def rules(self) -> Iterable[Rule]:
        yield excludes("teacher.dtype=float64", "teacher.url", expected="float32, bfloat16 or float16")
        yield Rule(
            ("teacher.prove", "teacher.model"),
            lambda prove, model: prove == "always" and model is None,
            "auto, or teacher.model, the weights to compare with",
        )

    def open(self, section: str, teacher: Any, objective: Any, batch_tokens: int) -> Any:
        from stillhouse.serving.client.served_teacher import connect

        return connect(teacher, objective.temperature_of(teacher), section)

    def prove(self, section: str, teacher: Any, store: Any, documents: Any, data: Any, device: Any) -> None:
        from stillhouse.serving.client.served_teacher import prove_servers

        prove_servers(section, teacher, store, documents, data, device)


URL = _Servers(
    "url",
    "on a server",
    beside=("model", "attention", "revision", "dtype"),
    options=("token_variable", "api", "signal", "timeout", "prove", "prove_every", "accept", "top_k"),
    any_tokens=True,
    compares_tokenizer=True,
    is_address=True,
)
