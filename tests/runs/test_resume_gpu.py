"""On a GPU, a run with `deterministic: true` that was killed and resumed equals an undisturbed one."""

from pathlib import Path

import pytest
import torch
from kit.runs import assert_same_run, run, write_run
from kit.signal_hooks import kill_at

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_and_resumed_is_the_same_to_the_bit(tmp_path: Path, precision: str) -> None:
    settings = {"device": "cuda", "deterministic": True, "train.precision": precision}
    write_run(tmp_path, family="qwen3", **{"train.steps": 12, "checkpoint.every": 4}, **settings)
    undisturbed, killed = tmp_path / "out", tmp_path / "killed"
    run("distill", tmp_path / "run.yaml")
    again = [tmp_path / "run.yaml", f"out={killed}"]
    kill_at(6, killed, *again)
    assert f"resuming from {killed}/checkpoints/step-00000004\n" in run("distill", *again).out
    assert_same_run(killed, undisturbed)
