"""On-policy runs with completions of servers: their log-probabilities, and the warning of an engine with others."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import assert_same_served, rollout_figures, served, write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import Command, last_step, run, wait_for
from kit.serving import Server
from kit.signal_hooks import signal_at
from kit.stub_servers import StubHandler, stub_server
from kit.stub_vllm import Vllm

from stillhouse.run.run import distill
from stillhouse.serving.client.served_weights import PROBE_TOKENS


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose completions were written in its own process."""
    folder = tmp_path_factory.mktemp("served")
    write_on_policy_run(folder, out=str(folder / "in_process"), **SETTINGS)
    run("distill", folder / "run.yaml")
    return folder


@pytest.fixture(scope="module")
def server(in_process: Path) -> Iterator[Server]:
    with Server(in_process / "student", "--generate") as running:
        yield running


SETTINGS: dict[str, Any] = {"checkpoint.every": 2, "train.steps": 8, "rollout.max_new_tokens": 9}


def test_a_served_run_is_that_of_one_process(in_process: Path, server: Server) -> None:
    run(*served(in_process, "served", server.url))
    assert_same_served(in_process / "served", in_process / "in_process")
    assert [path.name for path in sorted((in_process / "served" / "weights").iterdir())] == [
        "version-00000006",
        "version-00000007",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "pipeline=2"])
def test_two_processes_share_the_completions_of_a_server(in_process: Path, server: Server, layout: str) -> None:
    run_ranks(2, *served(in_process, layout, server.url), f"parallel.{layout}")
    assert_same_served(in_process / layout, in_process / "in_process")


@pytest.mark.parametrize(("schedule", "ahead"), [("two_step_off", 2), slow("one_step_off", 1)])
def test_a_servers_weights_are_as_old_as_the_schedule_says(
    in_process: Path, server: Server, schedule: str, ahead: int
) -> None:
    run(*served(in_process, schedule, server.url, **{"rollout.schedule": schedule}))
    lines = rollout_figures(in_process / schedule)
    assert [line["rollout/staleness_max"] for line in lines] == [min(step, ahead) for step in range(8)]


def test_a_server_that_is_killed_and_comes_back(in_process: Path) -> None:
    """It comes back with the weights that it was started with, and must not write anything with them."""
    arguments = (in_process / "student", "--generate")
    with Server(*arguments) as server:
        command = Command(*served(in_process, "killed", server.url))
        wait_for(lambda: last_step(in_process / "killed") >= 3)
        server.kill()
        with Server(*arguments, "--port", server.port):
            assert command.wait(180) == 0, command.out + command.err
    assert_same_served(in_process / "killed", in_process / "in_process")


@pytest.mark.slow
def test_of_two_servers_one_is_killed_for_good(in_process: Path) -> None:
    arguments = (in_process / "student", "--generate")
    with Server(*arguments) as one, Server(*arguments) as other:
        command = Command(*served(in_process, "one_left", one.url, other.url))
        wait_for(lambda: last_step(in_process / "one_left") >= 3)
        other.kill()
        assert command.wait(180) == 0, command.out + command.err
    assert_same_served(in_process / "one_left", in_process / "in_process")


@pytest.mark.parametrize("at", [slow(1), 4])
def test_a_trainer_that_is_killed_goes_on_with_the_same_server(in_process: Path, server: Server, at: int) -> None:
    out = in_process / f"resumed_{at}"
    arguments = served(in_process, out.name, server.url)
    command = Command(*arguments, hook=signal_at, hook_arguments=(at, signal.SIGKILL))
    assert command.wait(120) == -signal.SIGKILL, command.err
    run(*arguments)
    assert_same_served(out, in_process / "in_process")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_a_trainer_that_is_killed_asks_again_for_what_was_under_way(
    in_process: Path, server: Server, schedule: str
) -> None:
    out = in_process / f"resumed_{schedule}"
    arguments = served(in_process, out.name, server.url, **{"rollout.schedule": schedule})
    command = Command(*arguments, hook=signal_at, hook_arguments=(5, signal.SIGKILL))
    assert command.wait(120) == -signal.SIGKILL, command.err
    run(*arguments)
    lines = rollout_figures(out)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(line["rollout/staleness_max"] <= 2 for line in lines)


@pytest.mark.slow
def test_without_any_server_the_run_saves_and_stops_and_goes_on_later(in_process: Path, server: Server) -> None:
    out = in_process / "stopped"
    with Server(in_process / "student", "--generate") as killed:
        command = Command(*served(in_process, "stopped", killed.url, **{"rollout.timeout": "1.5"}))
        wait_for(lambda: last_step(out) >= 2)
        killed.kill()
        assert command.wait(120) == 1
        assert "the run has stopped after a checkpoint" in command.err
    run(*served(in_process, "stopped", server.url))
    assert_same_served(out, in_process / "in_process")


def test_a_server_of_another_model_is_refused_before_the_first_step(in_process: Path, tmp_path: Path) -> None:
    with Server(in_process / "teacher", "--generate") as server:
        assert "version-00000000" in run(*served(in_process, "foreign", server.url), code=1).err
    shutil.rmtree(in_process / "foreign")


def shifted(handler: StubHandler, content: dict[str, Any]) -> None:
    """An engine that computes otherwise only where the probe after each update does not look: late in a text."""
    [choice] = content["choices"]
    if len(choice["token_ids"]) > PROBE_TOKENS:
        for entry in choice["logprobs"]["content"]:
            entry["logprob"] -= 0.5
    handler.reply(200, content)


@pytest.mark.parametrize(
    ("schedule", "options", "learning_rate", "warning"),
    [
        ("sync", {}, 0.01, "with the same weights"),
        pytest.param("one_step_off", {}, 0.005, "", marks=pytest.mark.slow),
        pytest.param("async", {"mixes_weights": True}, 0.01, "with the same weights", marks=pytest.mark.slow),
        pytest.param("one_step_off", {}, 0.02, "at most 1 steps older, differ by", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_other_log_probabilities_is_warned_of(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schedule: str,
    options: dict[str, Any],
    learning_rate: float,
    warning: str,
) -> None:
    """Of a step's tokens, those that the present weights have written must have the same log-probabilities."""
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1"}
    write_on_policy_run(tmp_path, **settings)  # the student, which the server has from the start
    with stub_server(Vllm, tmp_path / "student", processed=True, **options) as server:
        settings |= {"rollout.url": server.url, "rollout.schedule": schedule, "train.learning_rate": learning_rate}
        if warning == "with the same weights":
            server.faults = [shifted] * 9999
        lines = rollout_figures(distill(write_on_policy_run(tmp_path, **settings)))
    warnings = [line for line in capsys.readouterr().out.splitlines() if "the engine's log-probabilities" in line]
    assert bool(warnings) == bool(warning)
    assert sum(warning in line for line in warnings) == bool(warning)  # once, beside that of older weights
    fresh = [line.get("rollout/log_ratio_fresh") for line in lines]
    assert fresh[0] is not None
    assert any(schedule is not None for schedule in fresh[1:]) == (schedule != "one_step_off")
    if warning != "with the same weights":
        assert max(log_ratio for log_ratio in fresh if log_ratio is not None) < 1e-5
        assert max(line["rollout/log_ratio"] for line in lines) > 1e-2


def test_an_engine_that_keeps_its_first_head_ends_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "train.learning_rate": 0.01}
    write_on_policy_run(tmp_path, **settings, **{"rollout.url": "http://127.0.0.1:1"})
    with stub_server(Vllm, tmp_path / "student", processed=True, keeps_head=True) as server:
        config = write_on_policy_run(tmp_path, **settings, **{"rollout.url": server.url})
        with pytest.raises(ValueError, match="and its log-probabilities are those of other weights"):
            distill(config)
