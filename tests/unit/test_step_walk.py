"""The way of a micro-batch from the loop to the objective is as short as docs/architecture.md says."""

from pathlib import Path

import pytest
from kit.step_walk import PIPELINE, walk

HEAD = ["TeacherStudentPair.forward", "Decoder.forward", "Head.forward", "StepLoss.__call__", "linear_objective"]


def test_in_one_process(tmp_path: Path) -> None:
    assert walk(tmp_path) == ["train", "TorchEngine.forward_backward", *HEAD]


@pytest.mark.slow
def test_in_a_pipeline(tmp_path: Path) -> None:
    stages = ["Pipeline.forward_backward", "_Stage.forward"]
    assert walk(tmp_path, **PIPELINE) == ["train", "TorchEngine.forward_backward", *stages, *HEAD]
