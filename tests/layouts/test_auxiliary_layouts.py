"""Losses between hidden states, MTP layers and recomputed activations at once, under layouts of two processes."""

from pathlib import Path

import pytest
from kit.layout_runs import assert_same_weights
from kit.ranks import run_ranks
from kit.runs import run, write_run

from stillhouse.libraries import is_supported

SETTINGS = {
    "train.steps": 3,
    "train.activation_checkpointing": True,
    "objective.hidden": [{"student": 0, "teacher": 0, "loss": "mse", "scale": 0.3}],
    "student.mtp": {"depths": 2, "scale": 0.5},
}


@pytest.mark.slow
@pytest.mark.skipif(not is_supported("multi-token prediction"), reason="needs a later transformers")
@pytest.mark.parametrize("layout", ["fsdp=2", "tensor=2", "pipeline=2", "context=2"])
def test_a_layout_gives_the_student_of_one_process(tmp_path: Path, layout: str) -> None:
    write_run(tmp_path, family="qwen3", **SETTINGS)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'one'}")
    run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / 'two'}", f"parallel.{layout}")
    assert_same_weights(tmp_path / "two", tmp_path / "one", 1e-5)
