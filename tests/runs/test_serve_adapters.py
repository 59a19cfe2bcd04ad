"""On-policy runs of a student with an adapter, whose completions a `stillhouse serve --generate` writes."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.low_bit import save_teacher
from kit.on_policy_runs import SAME, assert_same_figures, rollout_figures, served, write_on_policy_run
from kit.runs import Command, last_step, run, wait_for
from kit.serving import Server, load_nothing
from safetensors.torch import load_file

SETTINGS: dict[str, Any] = {
    "student.adapter": {"r": 4, "alpha": 8},
    "train.learning_rate": 1e-2,
    "train.steps": 8,
    "checkpoint.every": 2,
    "rollout.max_new_tokens": 9,
}


def adapter(out: Path) -> Path:
    return out / "adapter" / "adapter_model.safetensors"


def assert_same_run(out: Path, expected_out: Path) -> None:
    """The completions are the same, and what was trained on them differs by rounding."""
    assert_same_figures(out, expected_out, SAME, "loss/total_nats_per_token")
    assert all(figures["rollout/log_ratio_max"] < 1e-4 for figures in rollout_figures(out))
    matrices, expected_matrices = load_file(adapter(out)), load_file(adapter(expected_out))
    for name, matrix in expected_matrices.items():
        assert matrices[name].sub(matrix).abs().max() < 1e-4, name


@pytest.mark.parametrize(("top_k", "is_killed"), [slow(0, True), slow(1, False)])
def test_a_run_is_that_of_one_process_also_when_the_server_is_killed(
    tmp_path: Path, top_k: int, is_killed: bool
) -> None:
    """The server comes back with its base alone, and must not write anything without the present adapter.

    top_k: 0 samples from all tokens; 1 is greedy.
    """
    write_on_policy_run(tmp_path, **SETTINGS, **{"rollout.top_k": top_k})
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'in_process'}")
    arguments = (tmp_path / "student", "--generate")
    with Server(*arguments) as server, ExitStack() as stack:
        command = Command(*served(tmp_path, "served", server.url))
        wait_for(lambda: last_step(tmp_path / "served") >= 3)
        assert "adapter: r 4, alpha 8 on " in server.first.out
        if is_killed:
            server.kill()
            stack.enter_context(Server(*arguments, "--port", server.port))
        assert command.wait(180) == 0, command.out + command.err
    assert_same_run(tmp_path / "served", tmp_path / "in_process")
    (_, last) = sorted((tmp_path / "served" / "weights").iterdir())
    tensors = sum(path.stat().st_size for path in last.glob("*.safetensors"))
    assert (
        tensors == (last / "adapter_model.safetensors").stat().st_size == adapter(tmp_path / "served").stat().st_size
    )


@pytest.mark.slow
def test_a_quantized_server_has_the_base_of_a_quantized_student(tmp_path: Path) -> None:
    """As above with `student.quantize`; a server with the weights that were not rounded is refused."""
    kind = "nf4"
    save_teacher(tmp_path / "student")
    write_on_policy_run(tmp_path, **SETTINGS, **{"student.quantize": kind})
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'in_process'}")
    with Server(tmp_path / "student", "--generate", "--quantize", kind) as server:
        run(*served(tmp_path, "served", server.url))
    assert_same_run(tmp_path / "served", tmp_path / "in_process")
    with Server(tmp_path / "student", "--generate") as server:
        ended = run(*served(tmp_path, "plain", server.url), code=1)
        assert f"is {kind} in the run and None on the server; expected --quantize {kind}" in ended.err


@pytest.mark.slow
def test_a_server_with_another_base_is_refused_before_the_first_step(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **SETTINGS)
    with Server(tmp_path / "teacher", "--generate") as server:
        ended = run(*served(tmp_path, "foreign", server.url), code=1)
        assert "has an adapter that was trained on another base than the server's" in ended.err
    with Server(tmp_path / "student", "--generate", "--dtype", "bfloat16") as server:
        ended = run(*served(tmp_path, "rounded", server.url), code=1)
        assert "the dtype is float32 in the run and bfloat16 on the server; expected --dtype float32" in ended.err


@pytest.mark.slow
def test_a_server_that_keeps_the_adapter_before_is_found_by_its_log_probabilities(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **SETTINGS)
    with Server(tmp_path / "student", "--generate", hook=load_nothing) as server:
        ended = run(*served(tmp_path, "stale", server.url), code=1)
    assert "says that it generates with version 1, and its log-probabilities are those of other weights" in ended.err
