"""The part of `rules.py` about the engines: Megatron-Core, the dtypes between layers, and compiled layers."""

from stillhouse.config.rule import Rule, excludes

RULES_OF_ENGINES: tuple[Rule, ...] = (
    # the engine on Megatron-Core
    *(
        excludes(key, "parallel.engine=megatron", because="Megatron-Core does not have it here")
        for key in (
            *("student.adapter.dropout", "student.attention", "student.quantize"),
            *("teacher.offload", "teacher.quantize", "teacher.attention", "train.optimizer", "train.compile"),
            *("objective.hidden", "parallel.offload", "parallel.gather_dtype"),
        )
    ),
    Rule(
        ("parallel.megatron", "parallel.engine"),
        lambda megatron, engine: megatron is not None and engine != "megatron",
        "null, or parallel.engine=megatron",
    ),
    Rule(("teacher.parallel.megatron",), lambda megatron: megatron is not None, "null"),
    excludes("student.mtp.train=heads", "parallel.engine=megatron", expected="all"),
    Rule(
        ("parallel.schedule", "parallel.engine"),
        lambda schedule, engine: schedule not in ("1f1b", "interleaved") and engine == "megatron",
        "1f1b or interleaved",
    ),
    Rule(
        ("parallel.sequence", "parallel.engine"),
        lambda sequence, engine: sequence and engine != "megatron",
        "false, or parallel.engine=megatron",
    ),
    Rule(("teacher.parallel.engine",), lambda engine: engine == "megatron", "torch"),
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
        "train.compile",
        "objective.router_aux_loss",
        because="it is computed by hooks inside the layers, which compiled layers do not run",
    ),
    excludes(
        "train.compile", "parallel.tensor", "parallel.expert", because="torch cannot compile layers with DTensors"
    ),
    *(
        excludes("train.compile", f"{model}.quantize", because="its layers have no plain weights")
        for model in ("student", "teacher")
    ),
)
