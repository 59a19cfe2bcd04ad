"""Runs that train a share of the tokens: thresholds from step to step, layouts, resuming, and what is refused."""

import signal
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.layout_runs import distill, weights
from kit.on_policy_runs import write_on_policy_run
from kit.runs import Command, contents, metrics, run, write_run
from kit.signal_hooks import signal_at
from kit.tensors import assert_near

from stillhouse.config import ConfigError, RunConfig
from stillhouse.run.session import prepare

GATE = {"keep": 0.25, "by": "teacher_entropy"}
GATED = ("train/kept_share", "train/gate_threshold_nats", "train/gate_statistic_nats")


def write(folder: Path, **settings: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    return write_run(folder, **{"objective.token_gate": GATE, "train.steps": 4} | settings)


def of_steps(out: Path) -> list[dict[str, float]]:
    return [line for line in metrics(out) if "train/gradient_norm" in line]


@pytest.mark.parametrize("by", ["divergence", slow("teacher_entropy"), slow("student_entropy")])
def test_the_first_step_trains_all_tokens_and_later_ones_about_the_share(tmp_path: Path, by: str) -> None:
    write(tmp_path, **{"objective.token_gate": {"keep": 0.25, "by": by}})
    distill(tmp_path, "out", 1)
    first, *later = of_steps(tmp_path / "out")
    assert first["train/kept_share"] == 1
    assert "train/gate_threshold_nats" not in first
    for line in later:
        assert 0.1 < line["train/kept_share"] < 0.5
        assert line["train/gate_threshold_nats"] > line["train/gate_statistic_nats"] > 0
    write(tmp_path, **{"objective.token_gate": None})
    distill(tmp_path, "plain", 1)
    plain = metrics(tmp_path / "plain")
    # the first update is the one of all tokens; evaluation knows no gate
    assert first["train/gradient_norm"] == of_steps(tmp_path / "plain")[0]["train/gradient_norm"]
    held_out = [{key for key in line if key.startswith("eval/")} for line in metrics(tmp_path / "out")]
    assert held_out == [{key for key in line if key.startswith("eval/")} for line in plain]


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    write(tmp_path, **{"train.steps": 6, "checkpoint.every": 2})
    run_yaml = tmp_path / "run.yaml"
    run("distill", run_yaml, f"out={tmp_path / 'undisturbed'}")
    command = Command("distill", run_yaml, hook=signal_at, hook_arguments=(3, signal.SIGKILL))
    assert command.wait() == -signal.SIGKILL, command.err
    assert "resuming from" in run("distill", run_yaml).out
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "undisturbed" / "model")
    for name in GATED:
        lines = [[line.get(name) for line in of_steps(tmp_path / out)] for out in ("out", "undisturbed")]
        assert lines[0] == lines[1]


def assert_same_gates(out: Path, expected_out: Path) -> None:
    for line, expected in zip(of_steps(out), of_steps(expected_out), strict=True):
        for name in GATED[:2]:  # a threshold is the border of a bin, and a share a quotient of counts
            assert line.get(name) == expected.get(name), name
        assert line["train/gradient_norm"] == pytest.approx(expected["train/gradient_norm"], rel=1e-4)
    assert_near(weights(out), weights(expected_out), 1e-4)


def test_the_kept_tokens_do_not_depend_on_the_micro_batches(tmp_path: Path) -> None:
    config = write(tmp_path, **{"train.steps": 3})
    distill(tmp_path, "one", 1, f"train.micro_batch_tokens={config.data.max_tokens}")
    distill(tmp_path, "many", 1, f"train.micro_batch_tokens={3 * config.data.max_tokens}")
    assert_same_gates(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_the_kept_tokens_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    write(tmp_path, **{"train.steps": 3, "objective.token_gate": {"keep": 0.25, "by": "divergence"}})
    distill(tmp_path, "one", 1)
    for axis in ("fsdp", "tensor", "context", "pipeline"):
        distill(tmp_path, axis, 2, f"parallel.{axis}=2")
        assert_same_gates(tmp_path / axis, tmp_path / "one")


@pytest.mark.slow
def test_the_kept_tokens_are_the_same_on_megatron_core(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from kit.megatron_runs import megatron

    write(tmp_path, **{"train.steps": 3})
    distill(tmp_path, "one", 1)
    assert_same_gates(megatron(tmp_path, "megatron", 2, "parallel.tensor=2"), tmp_path / "one")


@pytest.mark.slow
def test_a_gate_on_the_students_own_completions_with_an_objective_for_each_origin(tmp_path: Path) -> None:
    by_origin = {"dataset": "skew_forward_kl(0.1)", "student": "skew_reverse_kl(0.1)"}
    settings = {"objective.by_origin": by_origin, "objective.loss": "forward_kl", "rollout.share": 0.5}
    gate = {"objective.token_gate": {"keep": 0.25, "by": "divergence"}, "train.steps": 4}
    write_on_policy_run(tmp_path, **settings | gate)
    distill(tmp_path, "out", 1)
    lines = of_steps(tmp_path / "out")
    assert [line["train/kept_share"] == 1 for line in lines] == [True, False, False, False]
    assert all(f"loss/{loss}/{origin}_nats_per_token" in lines[-1] for origin, loss in by_origin.items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"objective.loss": "cross_entropy"}, "got teacher_entropy with 'cross_entropy': expected student_entropy"),
    ],
)
def test_a_statistic_that_an_objective_does_not_have_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        prepare(write(tmp_path, **settings), announce=False)
    assert raised.value.key == "objective.token_gate.by"
