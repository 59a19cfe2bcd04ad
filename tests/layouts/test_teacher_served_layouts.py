"""Runs with a served teacher under layouts, and with processes that are killed: the model of the undisturbed run."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.faulty_proxy import Proxy, proxy_to, slow_answer
from kit.layout_runs import assert_same_weights
from kit.ranks import run_ranks
from kit.runs import Command, metrics, run, session_of, wait_for, write_run
from kit.serving import Server
from kit.stub_servers import reset

from stillhouse.serving import SAFETENSORS
from stillhouse.serving.wire import decode_request

LIMIT = 180
OBJECTIVE = {"objective.loss": "0.3*cross_entropy + 0.7*forward_kl", "checkpoint.every": 2}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run of the teacher in the job, in one process."""
    folder = tmp_path_factory.mktemp("served")
    write_run(folder, **OBJECTIVE, out=str(folder / "in the job"))
    run("distill", folder / "run.yaml")
    return folder


@pytest.fixture(scope="module")
def server(workspace: Path) -> Iterator[str]:
    with Server(workspace / "teacher") as started:
        yield started.url


def requested_rows(proxy: Proxy) -> int:
    """How many rows were asked for in all requests."""
    requests = [decode_request(body, SAFETENSORS, 4096)[1] for body in proxy.bodies]
    return sum(len(document.rows) for documents in requests for document in documents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("hidden", "tensor=2"), ("hidden", "pipeline=2"), ("chosen", "context=2")]
)
def test_the_model_of_one_process_and_each_row_is_fetched_once(
    workspace: Path, server: str, layout: str, kind: str
) -> None:
    counts, out = {}, {}
    with proxy_to(server) as (proxy, url):
        settings = {"teacher.url": url, "teacher.signal": kind, "teacher.top_k": 9, "data.eval": 0.0}
        session_of(workspace, cached=True, **OBJECTIVE, **settings).close()
        proof = requested_rows(proxy)
        for name, processes, override in (("one", 1, "seed=0"), ("two", 2, f"parallel.{layout}")):
            proxy.bodies.clear()
            out[name] = workspace / f"{kind} {layout} {name}"
            run_ranks(processes, "distill", workspace / "run.yaml", f"out={out[name]}", override)
            counts[name] = requested_rows(proxy) - processes * proof
    assert_same_weights(out["two"], out["one"])
    assert counts["one"] == counts["two"] > 0


@pytest.mark.slow
def test_fifty_steps_have_the_losses_of_the_teacher_in_the_job(workspace: Path, server: str) -> None:
    losses = {}
    for name, settings in (("job", {}), ("server", {"teacher.url": server})):
        out = workspace / f"fifty {name}"
        write_run(workspace, cached=name == "server", **OBJECTIVE, **settings, **{"train.steps": 50, "out": str(out)})
        run("distill", workspace / "run.yaml")
        losses[name] = [line["loss/total_nats_per_token"] for line in metrics(out) if "train/learning_rate" in line]
    assert len(losses["job"]) == 50
    assert losses["server"] == pytest.approx(losses["job"], abs=1e-6)
    assert_same_weights(workspace / "fifty server", workspace / "fifty job", 1e-5)


@pytest.mark.slow
def test_a_server_that_is_killed_within_a_request_and_started_again(workspace: Path) -> None:
    with (
        Server(workspace / "teacher") as first,
        Server(workspace / "teacher") as second,
        proxy_to(first.url) as (proxy, url),
    ):
        write_run(workspace, cached=True, **OBJECTIVE, **{"teacher.url": url, "out": str(workspace / "killed")})
        proxy.faults = [slow_answer] * 1000
        command = Command("distill", workspace / "run.yaml")
        wait_for(lambda: proxy.scored > 5)
        first.kill()
        threading.Timer(2.0, lambda: setattr(proxy, "upstream", second.url)).start()
        assert command.wait(LIMIT) == 0, command.err
    assert "fails, and is asked again" in command.out
    assert "answers again" in command.out
    assert_same_weights(workspace / "killed", workspace / "in the job", 1e-5)


@pytest.mark.slow
def test_a_signal_is_obeyed_while_no_server_answers(workspace: Path, server: str) -> None:
    out = workspace / "terminated"
    with proxy_to(server) as (proxy, url):
        write_run(workspace, cached=True, **OBJECTIVE, **{"teacher.url": url, "out": str(out)})
        proxy.after(7, [reset] * 100_000)
        command = Command("distill", workspace / "run.yaml")
        wait_for(lambda: "fails, and is asked again" in command.out)
        command.send(signal.SIGTERM)
        assert command.wait(20) == 143, command.err
    assert "resuming from" in run("distill", workspace / "run.yaml", f"teacher.url={server}").out
    assert_same_weights(out, workspace / "in the job", 1e-5)


@pytest.mark.slow
def test_a_trainer_that_is_killed_with_requests_under_way_resumes(workspace: Path, server: str) -> None:
    out = workspace / "trainer"
    with proxy_to(server) as (proxy, url):
        write_run(workspace, cached=True, **OBJECTIVE, **{"teacher.url": url, "out": str(out)})
        proxy.faults = [slow_answer] * 1000
        command = Command("distill", workspace / "run.yaml")
        wait_for(lambda: any((out / "checkpoints").glob("step-????????")))
        wait_for(lambda: proxy.under_way > 0)
        command.send(signal.SIGKILL)
        assert command.wait() == -9
        assert "resuming from" in run("distill", workspace / "run.yaml").out
    assert_same_weights(out, workspace / "in the job", 1e-5)
