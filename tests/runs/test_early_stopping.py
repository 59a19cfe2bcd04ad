"""eval.patience: when training ends, which weights become the final model, and what a resumed run decides."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import assert_same_run, metrics, run, write_run
from kit.signal_hooks import kill_at

from stillhouse.loops.greedy_evaluation import EvaluationContext
from stillhouse.output.metrics import WITHOUT_BEST

REASON = "no new best eval/quality in the last 2 evaluations (eval.patience)"


def quality(context: EvaluationContext) -> dict[str, float]:
    """A metric that is best at step 3; at step 0 it is better, but the evaluation before training does not count."""
    return {"quality": {0: 9.0, 2: 1.0, 3: 2.0, 4: 2.0}.get(context.step, 0.5)}


SETTINGS: dict[str, Any] = {
    **{"eval.patience": 2, "eval.every": 1, "eval.callbacks": [f"{__name__}:quality"], "train.steps": 9},
    **{"checkpoint.best": "eval/quality", "checkpoint.greater_is_better": True},
    **{"checkpoint.every": 0, "checkpoint.keep": 1},
}
COUNTS = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 2)]


def counts(out: Path) -> list[tuple[int, int]]:
    return [(line["step"], line[WITHOUT_BEST]) for line in metrics(out) if WITHOUT_BEST in line]


def best_weights(out: Path) -> bytes:
    return (out / "checkpoints/step-00000003/student/model.safetensors").read_bytes()


def test_training_ends_early_with_the_weights_of_the_best_checkpoint(tmp_path: Path) -> None:
    write_run(tmp_path, **SETTINGS)
    done, out = run("distill", tmp_path / "run.yaml"), tmp_path / "out"
    assert f"step 5: training ended early: {REASON}\n" in done.out
    assert "the final model has the weights of step 3, which has the best eval/quality\n" in done.out
    assert counts(out) == COUNTS
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000003", "step-00000005"]
    assert (out / "model/model.safetensors").read_bytes() == best_weights(out)
    assert json.loads((out / "tokens.json").read_text())["step"] == 3
    assert REASON in (out / "report.html").read_text()
    exported = tmp_path / "exported"
    assert "exported step 3 " in run("export", out, "--out", exported).out
    assert (exported / "model.safetensors").read_bytes() == best_weights(out)
    assert "which is complete" in run("distill", tmp_path / "run.yaml").out


def test_without_an_early_end_the_final_model_is_still_the_best_one(tmp_path: Path) -> None:
    write_run(tmp_path, **SETTINGS | {"eval.patience": 7})
    done = run("distill", tmp_path / "run.yaml")
    assert "ended early" not in done.out
    assert counts(tmp_path / "out")[-1] == (9, 6)
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == best_weights(tmp_path / "out")
    assert "ended early" not in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("step", [slow(3), 5])
def test_a_killed_run_ends_after_the_same_step(tmp_path: Path, step: int) -> None:
    """The checkpoint before the kill at step 5 already has one evaluation without a new best value."""
    write_run(tmp_path, **SETTINGS | {"checkpoint.every": 2})
    run("distill", tmp_path / "run.yaml")
    again = [tmp_path / "run.yaml", f"out={tmp_path / 'killed'}"]
    kill_at(step, tmp_path / "killed", *again)
    resumed = run("distill", *again)
    assert f"resuming from {tmp_path}/killed/checkpoints/step-0000000{step - 1}\n" in resumed.out
    assert counts(tmp_path / "killed") == COUNTS
    assert_same_run(tmp_path / "killed", tmp_path / "out")


def test_two_ranks_end_after_the_same_step(tmp_path: Path) -> None:
    """Only rank 0 has the metrics of callbacks."""
    write_run(tmp_path, **SETTINGS | {"parallel.fsdp": 2})
    first, second = run_ranks(2, "distill", tmp_path / "run.yaml")
    assert REASON in first.out
    assert "early" not in second.out
    assert counts(tmp_path / "out") == COUNTS
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == best_weights(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "two_step_off"])
def test_an_on_policy_run_ends_early(tmp_path: Path, schedule: str) -> None:
    """Completions for later steps, which two_step_off has requested, are dropped."""
    write_on_policy_run(tmp_path, **SETTINGS | {"rollout.schedule": schedule})
    assert REASON in run("distill", tmp_path / "run.yaml").out
    assert counts(tmp_path / "out") == COUNTS
