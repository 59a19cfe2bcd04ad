"""The ways of a micro-batch and of a sample from the loop on are as short as docs/architecture.md says."""

from pathlib import Path

import pytest
from kit.step_walk import PIPELINE, walk, walk_on_policy

HEAD = ["TeacherStudentPair.forward", "Decoder.forward", "Head.forward", "StepLoss.__call__", "linear_objective"]


def test_in_one_process(tmp_path: Path) -> None:
    assert walk(tmp_path) == ["train", "TorchEngine.forward_backward", *HEAD]


@pytest.mark.slow
def test_in_a_pipeline(tmp_path: Path) -> None:
    stages = ["Pipeline.forward_backward", "_Stage.forward"]
    assert walk(tmp_path, **PIPELINE) == ["train", "TorchEngine.forward_backward", *stages, *HEAD]


def test_the_samples_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = walk_on_policy(tmp_path, monkeypatch)
    take = ["train", "Rollout.take"]
    generate = ["InJobEngine.generate", "Generator.generate", "Generator.batch", "Generator._run"]
    score = [f"Samples.{name}" for name in ("next_requests", "receive", "_call_about", "_request_rewards")]
    assert samples.token == [*take, "InJobEngine.complete", *generate, "TokenSampler.__call__"]
    assert samples.reward == [*take, "InJobEngine.complete", *score, "RewardSum.request", "FunctionCalls.request"]
    assert samples.switches <= 60, (tmp_path / "switches.txt").read_text()
    assert samples.closures == []
