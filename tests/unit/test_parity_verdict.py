"""`stillhouse parity` calls a gradient different if it contains a NaN, or if a NaN is in the list of parameters. It
names the keys that it does not compare.
"""

import math
from dataclasses import fields
from itertools import permutations

import pytest
from kit.families import build

from stillhouse.config import load_config
from stillhouse.config.engine_capabilities import capabilities
from stillhouse.engine.torch_engine import TorchEngine
from stillhouse.models import Decoder
from stillhouse.objective.spec import ObjectiveSpec
from stillhouse.parallel import Layout, single_process_runner
from stillhouse.tools.parity import HEADER, LEFT_OUT, Row, differences, layouts, left_out, worst


def test_a_nan_in_any_position_is_called_different() -> None:
    runner = single_process_runner(Decoder(build("llama"), verify=False), None)
    engine = TorchEngine(runner, ObjectiveSpec(cross_entropy=1.0))
    for parameter in runner.decoders[0].parameters():
        parameter.grad = parameter.detach().clone()
    expected = {name: gradient.clone() for name, gradient in engine.gradients() if gradient is not None}
    same = worst(differences(engine, expected, 1e-3))
    assert Row("all alike", 0.0, same[1], same[0]).verdict == "same"
    assert len(expected) > 10
    for name, parameter in runner.named_parameters():
        assert parameter.grad is not None
        kept = parameter.grad
        parameter.grad = kept.clone()
        parameter.grad.view(-1)[-1] = math.nan
        worst_name, error = worst(differences(engine, expected, 1e-3))
        parameter.grad = kept
        assert Row("one NaN", 0.0, error, worst_name).verdict == f"DIFFERENT in {name}"
        # and the worst over ranks, of which another one has a finite error
        assert math.isnan(worst([("other", 0.5), (worst_name, error), ("third", math.inf)])[1])


@pytest.mark.parametrize("errors", list(permutations([0.1, math.nan, math.inf])))
def test_a_nan_is_the_worst_in_any_order(errors: tuple[float, ...]) -> None:
    assert math.isnan(worst(enumerate(errors))[1])
    assert worst(enumerate(error for error in errors if not math.isnan(error)))[1] == math.inf


def test_the_reason_for_a_refused_layout_is_below_its_line_of_the_table() -> None:
    row, *reason = str(Row("tensor 2", refused=f"{'the heads cannot be divided ' * 9}\nover 2 ranks")).splitlines()
    assert row.split("  ")[-1] == "not possible:"
    assert row.index("not possible") == HEADER.index("verdict")
    assert len(reason) > 1
    assert all(line.startswith("    ") and len(line) <= 118 for line in reason)
    assert reason[-1].endswith("over 2 ranks")


def test_keys_that_no_layout_here_has_are_named_if_they_are_set() -> None:
    settings = {"student": {"model": "x"}, "data": {"train": "x"}, "objective": {"loss": "cross_entropy"}, "out": "x"}
    assert left_out(load_config(None, settings=settings)) == []
    train = {"compile": True, "residual_dtype": "bfloat16", "precision": "bf16"}
    parallel = {"gather_dtype": "bfloat16", "offload": True}
    config = load_config(None, settings=settings | {"train": train, "parallel": parallel})
    values = ("True", "bfloat16", "bfloat16", "True")
    assert left_out(config) == [f"{key}={value}" for key, value in zip(LEFT_OUT[:4], values, strict=True)]
    megatron = {"train": {"activation_checkpointing": True}, "parallel": {"engine": "megatron", "megatron": {"x": 1}}}
    left = ["parallel.megatron={'x': 1}", "train.activation_checkpointing=True"]
    assert left_out(load_config(None, settings=settings | megatron)) == left
    # with them, nothing is missing that a run's layout has beside its degrees and its schedule
    names = {key.partition(".")[2] for key in LEFT_OUT} | {"options", "recompute"}
    compared = {"degrees", "schedule", "sequence", "autocast"}  # the last one is float32 in every step
    assert names == {field.name for field in fields(Layout)} - compared


def test_one_process_has_a_layout_for_each_axis() -> None:
    assert len(layouts(capabilities("torch"), 1)) == len(capabilities("torch").axes)
