"""On-policy runs with servers that write the completions, and that are killed."""

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


@pytest.mark.parametrize(
    "schedule",
    ["async", *(slow(schedule) for schedule in ("one_step_off", "two_step_off"))],
)
def test_the_schedules_with_a_server(in_process: Path, server: Server, schedule: str) -> None:
    run(*served(in_process, schedule, server.url, **{"rollout.schedule": schedule}))
    lines = rollout_figures(in_process / schedule)
    assert len(lines) == 8
    assert all(line["rollout/staleness_max"] <= 2 for line in lines)
    assert lines[-1]["rollout/staleness_max"] >= 1


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
