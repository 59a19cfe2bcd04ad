"""Servers that fail, answer wrongly, die, come back or do not answer: nothing is lost or wrongly accepted."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit import first_is_quick
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import wait_for
from kit.serving import Server
from kit.stub_servers import Fault, StubHandler, StubServer, broken, busy, reset, stub_server
from kit.stub_vllm import Vllm
from kit.writer_cases import TEMPERATURE, VOCABULARY, Student, engine_of, requests_of, wait_for_tokens

from stillhouse.config.servers import ServerError
from stillhouse.rollout.records import Sampling
from stillhouse.rollout.rollout import Rollout
from stillhouse.serving.client import pool, served_weights
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.served_weights import MAX_RESTORES, PROBE_TOKENS
from stillhouse.serving.client.vllm import VllmApi


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that failed are sent again soon; a server that restarts is asked again after a tenth of `PATIENCE`."""
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(served_weights, "PATIENCE", 2.0)


def outside(choice: dict[str, Any]) -> None:
    choice["token_ids"][0] = choice["logprobs"]["content"][0]["token_id"] = VOCABULARY


def too_long(choice: dict[str, Any]) -> None:
    choice["token_ids"] *= 2
    choice["logprobs"]["content"] *= 2
    choice["weight_versions"][-1]["end"] *= 2


#: changes of an answer's only choice, and the error
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "nan": (lambda choice: choice["logprobs"]["content"][-1].update(logprob=math.nan), "less than or equal to 0"),
    "above_zero": (lambda choice: choice["logprobs"]["content"][-1].update(logprob=0.5), "less than or equal to 0"),
    "outside": (outside, "expected 0 to 250"),
    "too_long": (too_long, "expected 1 to 12"),
    "other_ids": (
        lambda choice: choice["token_ids"].insert(0, choice["token_ids"].pop() ^ 1),
        "ids of the completion and of its log-probabilities differ",
    ),
    "stopped_early": (lambda choice: choice.update(finish_reason="stop"), "a completion that ends with token"),
    "aborted": (lambda choice: choice.update(finish_reason="abort"), "gives no completion"),
    "without_versions": (lambda choice: choice.update(weight_versions=None), "versions of 0 tokens"),
    "some_versions": (lambda choice: choice["weight_versions"][0].update(end=11), "versions of 11 tokens"),
}


def changed(change: Callable[[dict[str, Any]], None]) -> Fault:
    def fault(handler: StubHandler, content: dict[str, Any]) -> None:
        change(content["choices"][0])
        handler.reply(200, content)

    return fault


def truncated(handler: StubHandler, content: dict[str, Any]) -> None:
    handler.reply(200, json.dumps(content).encode()[:-40])


DAMAGED: dict[str, tuple[Fault, str]] = {
    "truncated": (truncated, "gives no completion"),
    **{name: (changed(change), message) for name, (change, message) in CHANGES.items()},
}
FAILED: dict[str, Fault] = {"busy": busy, "broken": broken, "reset": reset}


@pytest.mark.parametrize("fault", [*first_is_quick(FAILED), *first_is_quick(DAMAGED)])
def test_a_failed_request_is_repeated(student: Student, server: StubServer, engine: ServedEngine, fault: str) -> None:
    failing = FAILED[fault] if fault in FAILED else DAMAGED[fault][0]
    server.faults = [failing] * (40 if fault == "busy" else 3)
    requests = requests_of(6)
    student.assert_all_written(requests, engine.generate(requests), {1})
    assert not server.faults


@pytest.mark.parametrize("fault", first_is_quick(DAMAGED))
def test_answers_that_are_always_damaged_end_the_run(server: StubServer, engine: ServedEngine, fault: str) -> None:
    damage, message = DAMAGED[fault]
    server.faults = [damage] * 99
    [future] = engine.generate(requests_of(1))
    with pytest.raises(ServerError, match=f"answers could not be used.*{message}"):
        future.result(30)


def test_a_server_that_says_nothing_ends_the_run(student: Student, server: StubServer) -> None:
    with closing(engine_of(server, timeout=1.0)) as engine:
        engine.update_weights(1, student.published(1))
        server.faults = [lambda handler, _: time.sleep(20)] * 9
        [future] = engine.generate(requests_of(1))
        with pytest.raises(ServerError, match="no server of the student has answered for 1 seconds"):
            future.result(30)


@pytest.mark.slow
def test_a_server_that_restarts_is_given_the_weights_again(student: Student, server: StubServer) -> None:
    server.options["seconds"] = server.model.seconds = 0.05
    lines: list[str] = []
    with closing(engine_of(server, warn=lines.append)) as engine:
        engine.update_weights(1, student.published(1))
        engine.update_weights(2, student.published(2))
        requests = requests_of(40)
        futures = engine.generate(requests)
        for count in (1, 2):
            wait_for_tokens(server, requests, count, any)
            server.restart()
        student.assert_all_written(requests, futures, {2})
    assert any("has other weights than the run has loaded" in line for line in lines)


def test_of_two_servers_one_dies_during_an_update_and_comes_back(
    student: Student, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_weights, "PATIENCE", 1.0)
    with (
        stub_server(Vllm, student.folder / "model", processed=True) as other,
        closing(engine_of(server, other, timeout=8.0)) as engine,
    ):
        engine.update_weights(1, student.published(1))
        other.before["/collective_rpc"] = other.kill
        engine.update_weights(2, student.published(2))
        student.assert_all_written(requests_of(6), engine.generate(requests_of(6)), {2})
        other.start()
        end = time.monotonic() + 10
        while other.model.label == "default" or other.model.paused:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.kill()  # now the other one has to write everything
        student.assert_all_written(requests_of(6), engine.generate(requests_of(6)), {2})
    server.start()


def test_a_server_that_never_loads_weights_does_not_hold_up_the_run(student: Student, server: StubServer) -> None:
    """Of two, the other one goes on; alone, it ends the run. The limit of an answer is far longer."""
    ending = threading.Event()
    with (
        stub_server(Vllm, student.folder / "model", processed=True) as other,
        closing(engine_of(server, other, timeout=600.0, update_timeout=2.0)) as engine,
    ):
        before = len(server.requests)
        server.before["/collective_rpc"] = lambda: ending.wait() and None
        engine.update_weights(1, student.published(1))
        student.assert_all_written(requests_of(6), engine.generate(requests_of(6)), {1})
        assert not [path for path, _ in server.requests[before:] if path == VllmApi.path]
        other.before["/collective_rpc"] = lambda: ending.wait() and None
        message = f"{other.url} has not loaded version 2 of the weights within 2 s .train.timeout."
        with pytest.raises(ServerError, match=message):
            engine.update_weights(2, student.published(2))
        ending.set()


#: the path of a request before which a server restarts, after a first request to another path
MOMENTS = {
    **{
        path: ("", path)
        for path in ("/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/resume")
    },
    "the proof": ("", VllmApi.path),
    "between weights and label": ("/reset_prefix_cache", "/update_weight_version"),
}


@pytest.mark.parametrize("moment", first_is_quick(MOMENTS))
def test_a_server_that_restarts_during_an_update(student: Student, server: StubServer, moment: str) -> None:
    """Whatever it has forgotten: what it writes as version 1 is written by version 1 and not by its first weights."""
    first, path = MOMENTS[moment]
    with closing(engine_of(server)) as engine:
        if first:
            server.before[first] = lambda: server.before.update({path: server.restart})
        else:
            server.before[path] = server.restart
        engine.update_weights(1, student.published(1))
        assert not server.before
        student.assert_all_written(requests_of(4), engine.generate(requests_of(4)), {1})


def test_half_loaded_weights_write_nothing(student: Student, server: StubServer) -> None:
    server.model.seconds = 0.02
    with closing(engine_of(server, sampling=Sampling(40, temperature=TEMPERATURE))) as engine:
        engine.update_weights(1, student.published(1))
        requests = requests_of(4)
        futures = engine.generate(requests)
        wait_for_tokens(server, requests, 2)
        server.failing_loads = 1
        with pytest.raises(ServerError, match=r"loading the weights failed: 500.*out of memory.*stays paused"):
            engine.update_weights(2, student.published(2))
        assert server.model.paused
        assert not any(future.done() for future in futures)
        engine.update_weights(2, student.published(2))  # a second attempt succeeds, and they go on
        student.assert_all_written(requests, futures, {1, 2}, count=40)


def test_completions_under_way_go_on_with_new_weights(student: Student, server: StubServer) -> None:
    server.model.seconds = 0.02
    with closing(engine_of(server, sampling=Sampling(60, temperature=TEMPERATURE))) as engine:
        engine.update_weights(1, student.published(1))
        requests = requests_of(5)
        futures = engine.generate(requests)
        for version in (2, 3):
            wait_for_tokens(server, requests, 10 * version)
            engine.update_weights(version, student.published(version))
        student.assert_all_written(requests, futures, {1, 2, 3}, count=60)


def test_a_server_with_other_weights_again_and_again_is_given_up(server: StubServer, engine: ServedEngine) -> None:
    def foreign(handler: StubHandler, content: dict[str, Any]) -> None:
        """Another job gives the server weights after each of ours: only the proof sees our own."""
        if handler.state.requests[-1][1]["sampling_params"]["max_tokens"] > PROBE_TOKENS:
            content["choices"][0]["weight_versions"][0]["version"] = "another job's"
        handler.reply(200, content)

    server.faults = [foreign] * 99
    [future] = engine.generate(requests_of(1))
    with pytest.raises(ServerError, match="has other weights again and again: expected a server"):
        future.result(60)
    loads = [path for path, _ in server.requests if path == "/collective_rpc"]
    assert len(loads) == 1 + MAX_RESTORES


#: seconds after which a run must have ended: SECONDS_TO_STOP, and some for the checkpoint
SOON = 20.0
PATIENCE = 90


def stop_before(step: int, pid: int, marker: str) -> None:
    """Stop a server right before a step (from 0) asks for completions."""
    take = Rollout.take

    def taking(rollout: Rollout, at: int, *others: Any) -> Any:
        if at == step and os.environ["RANK"] == "0":
            os.kill(pid, signal.SIGSTOP)
            Path(marker).touch()
        return take(rollout, at, *others)

    Rollout.take = taking  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "which", "processes"), [(0, "writer", 1), (0, "teacher", 2), (3, "writer", 2), (3, "teacher", 1)]
)
def test_a_signal_ends_a_run_whose_server_is_silent(tmp_path: Path, which: str, after: int, processes: int) -> None:
    """The server is stopped, not ended: its connections stay open, and nothing comes."""
    out = tmp_path / "out"
    settings = {"checkpoint.every": 0, "rollout.schedule": "one_step_off", "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **settings)
    with Server(tmp_path / "student", "--generate") as writer, Server(tmp_path / "teacher") as teacher:
        served = {"teacher.url": teacher.url, "teacher.timeout": PATIENCE}
        served |= {"rollout.engine": "stillhouse", "rollout.url": writer.url, "rollout.timeout": PATIENCE}
        write_on_policy_run(tmp_path, cached=True, **settings, **served)
        arguments = ("distill", tmp_path / "run.yaml")
        stopped, marker = {"writer": writer, "teacher": teacher}[which], tmp_path / "stopped"
        pid = stopped.first.process.pid
        ranks = Ranks(processes, *arguments, hook=stop_before, hook_arguments=(after, pid, str(marker)))
        wait_for(marker.exists)
        time.sleep(1)
        ranks.send(signal.SIGTERM)
        started = time.monotonic()
        codes = ranks.wait(SOON, grace=SOON)
        stopped.first.send(signal.SIGCONT)
        assert codes == [128 + signal.SIGTERM] * processes, ranks.texts
        assert time.monotonic() - started < SOON
        assert "Traceback" not in ranks.err
        where = f"after step {after}; checkpoint " if after else "before its first step was finished; "
        assert f"stopped by SIGTERM {where}" in ranks[0].err
        assert list((out / "checkpoints").glob("step-*")) == [out / "checkpoints" / f"step-{after:08d}"] * (after > 0)
        run_ranks(processes, *arguments)
    assert [line["step"] for line in rollout_figures(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_server_that_never_loads_weights_ends_all_ranks(tmp_path: Path) -> None:
    out, path = tmp_path / "out", "/collective_rpc"
    settings = {"checkpoint.every": 0, "parallel.fsdp": 2, "train.timeout": 15, "rollout.engine": "vllm"}
    write_on_policy_run(tmp_path, **settings, **{"rollout.url": "http://x"})
    with stub_server(Vllm, tmp_path / "student", processed=True) as server:
        write_on_policy_run(tmp_path, **settings, **{"rollout.url": server.url})
        ending = threading.Event()
        # the first update succeeds, the second one never ends
        server.before[path] = lambda: server.before.update({path: lambda: ending.wait() and None})
        ranks = Ranks(2, "distill", tmp_path / "run.yaml")
        codes = ranks.wait(PATIENCE)
        ending.set()
    assert codes == [1, 1], ranks.texts
    assert f"{server.url} has not loaded version 1 of the weights within 15 s (train.timeout)" in ranks[0].err
    assert f"the run has stopped after a checkpoint: {out / 'checkpoints' / 'step-00000001'}" in ranks[0].err
    assert "Traceback" not in ranks.err
