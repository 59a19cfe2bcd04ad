"""The part of `rules.py` about the engines, the dtypes between layers, and compiled layers."""

from collections.abc import Iterator

from stillhouse.config.engines import GROUP, EngineCapabilities
from stillhouse.config.rule import Rule, excludes
from stillhouse.display import enumerated
from stillhouse.registry import load_all


def engine_rules() -> Iterator[Rule]:
    """The rules that follow from the capabilities of the registered engines."""
    engines = {name: kind.capabilities for name, kind in load_all(GROUP).items()}
    for name, engine in engines.items():
        yield from _rules_of_engine(name, engine)
    with_sequence = [name for name, engine in engines.items() if engine.sequence]
    yield Rule(
        ("parallel.sequence", "parallel.engine"),
        lambda sequence, engine: sequence and engine not in with_sequence,
        f"false, or {enumerated([f'parallel.engine={name}' for name in with_sequence], 'or')}",
    )


def _rules_of_engine(name: str, engine: EngineCapabilities) -> Iterator[Rule]:
    schedules = engine.schedules
    for key in engine.without:
        yield excludes(key, f"parallel.engine={name}", because=f"{engine.title} does not have it here")
    if schedules is not None:
        yield Rule(
            ("parallel.schedule", "parallel.engine"),
            lambda schedule, used: used == name and schedule not in schedules,
            enumerated(schedules, "or"),
        )
    if engine.settings:
        yield Rule(
            (f"parallel.{name}", "parallel.engine"),
            lambda settings, used: settings is not None and used != name,
            f"null, or parallel.engine={name}",
        )
        yield Rule((f"teacher.parallel.{name}",), lambda settings: settings is not None, "null")


LAYER_RULES: tuple[Rule, ...] = (
    Rule(("teacher.parallel.engine",), lambda engine: engine not in (None, "torch"), "torch"),
    Rule(("teacher.parallel.sequence",), bool, "false"),
    excludes(
        "parallel.gather_dtype",
        "train.precision=fp32",
        expected="null, or train.precision=bf16",
        because="fp32 computes in the weights' own dtype",
    ),
    excludes(
        "train.residual_dtype",
        "train.precision=fp32",
        expected="null, or train.precision=bf16",
        because="fp32 computes in the weights' own dtype",
    ),
    excludes(
        "train.compile", "parallel.tensor", "parallel.expert", because="torch cannot compile layers with DTensors"
    ),
    *(
        excludes("train.compile", f"{model}.quantize", because="its layers have no plain weights")
        for model in ("student", "teacher")
    ),
)
