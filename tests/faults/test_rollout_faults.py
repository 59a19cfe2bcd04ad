"""Servers that fail, answer wrongly, die and come back: nothing is lost, nothing by other weights is accepted."""

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit.stub_writers import Fault, VllmWriter, WriterHandler, WriterServer, writing
from kit.writer_cases import TEMPERATURE, VOCABULARY, Student, engine_of, requests_of, results, wait_for_tokens

from stillhouse.generation.sample import Sampling
from stillhouse.serving import pool
from stillhouse.serving.client import served_weights
from stillhouse.serving.client.engine_proof import PROBE_TOKENS
from stillhouse.serving.client.served_weights import MOST_RESTORED
from stillhouse.serving.engines.vllm import VllmApi
from stillhouse.serving.pool import ServerError


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that failed are sent again soon; a server that restarts is asked again after a tenth of `PATIENCE`."""
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(served_weights, "PATIENCE", 2.0)


@pytest.fixture
def server(student: Student) -> Iterator[WriterServer]:
    with writing(VllmWriter, student.folder / "model", processed=True) as started:
        yield started


def busy(handler: WriterHandler, content: dict[str, Any]) -> None:
    handler.reply(429, {"error": {"message": "the queue is full"}}, **{"Retry-After": "0"})


def broken(handler: WriterHandler, content: dict[str, Any]) -> None:
    handler.reply(500, {"error": {"message": "out of memory"}})


def reset(handler: WriterHandler, content: dict[str, Any]) -> None:
    handler.reset()


def truncated(handler: WriterHandler, content: dict[str, Any]) -> None:
    handler.reply(200, json.dumps(content).encode()[:-40])


def not_a_number(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["logprobs"]["content"][-1]["logprob"] = math.nan
    handler.reply(200, content)


def above_zero(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["logprobs"]["content"][-1]["logprob"] = 0.5
    handler.reply(200, content)


def outside(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["token_ids"][0] = VOCABULARY
    content["choices"][0]["logprobs"]["content"][0]["token_id"] = VOCABULARY
    handler.reply(200, content)


def too_long(handler: WriterHandler, content: dict[str, Any]) -> None:
    [choice] = content["choices"]
    choice["token_ids"] *= 2
    choice["logprobs"]["content"] *= 2
    choice["weight_versions"][-1]["end"] *= 2
    handler.reply(200, content)


def other_ids(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["token_ids"][0] ^= 1
    handler.reply(200, content)


def stopped_early(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["finish_reason"] = "stop"
    handler.reply(200, content)


def aborted(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["finish_reason"] = "abort"
    handler.reply(200, content)


def without_versions(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["weight_versions"] = None
    handler.reply(200, content)


def some_versions(handler: WriterHandler, content: dict[str, Any]) -> None:
    content["choices"][0]["weight_versions"][0]["end"] -= 1
    handler.reply(200, content)


DAMAGED: dict[Fault, str] = {
    truncated: "gives no completion",
    not_a_number: "not finite, or above 0",
    above_zero: "not finite, or above 0",
    outside: "expected 0 to 250",
    too_long: "expected 1 to 12",
    other_ids: "ids of the completion and of its log-probabilities differ",
    stopped_early: "a completion that ends with token",
    aborted: "gives no completion",
    without_versions: "versions of 0 tokens",
    some_versions: "versions of 11 tokens",
}


@pytest.mark.parametrize("fault", [busy, broken, reset, *DAMAGED], ids=lambda fault: fault.__name__)
def test_a_failed_request_is_sent_again(student: Student, server: WriterServer, fault: Fault) -> None:
    """Answers that are damaged every time end the run."""
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    server.faults = [fault] * (40 if fault is busy else 3)
    requests = requests_of(3)
    for request, result in zip(requests, results(engine, requests), strict=True):
        student.assert_written(request, result, count=12)
        assert (result.versions_N == 1).all()
    assert not server.faults
    if fault in DAMAGED:
        server.faults = [fault] * 99
        [future] = engine.generate(requests_of(1))
        with pytest.raises(ServerError, match=f"answers could not be used.*{DAMAGED[fault]}"):
            future.result(30)
    engine.close()


def test_a_server_that_says_nothing_ends_the_run(student: Student, server: WriterServer) -> None:
    engine = engine_of(server, timeout=1.0)
    engine.update_weights(1, student.published(1))
    server.faults = [lambda handler, _: time.sleep(20)] * 9
    [future] = engine.generate(requests_of(1))
    with pytest.raises(ServerError, match="no server of the student has answered for 1 seconds"):
        future.result(30)
    engine.close()


def test_a_server_that_restarts_is_given_the_weights_again(student: Student, server: WriterServer) -> None:
    server.options["seconds"] = server.writer.seconds = 0.02
    lines: list[str] = []
    engine = engine_of(server, warn=lines.append)
    engine.update_weights(1, student.published(1))
    engine.update_weights(2, student.published(2))
    requests = requests_of(40)
    futures = engine.generate(requests)
    for count in (1, 2):
        wait_for_tokens(server, requests, count, any)
        server.restart()
    for request, future in zip(requests, futures, strict=True):
        found = future.result(60)
        assert (found.versions_N == 2).all()
        student.assert_written(request, found, count=12)
    assert any("has other weights than it was given" in line for line in lines)
    engine.close()


def test_of_two_servers_one_dies_during_an_update_and_comes_back(
    student: Student, server: WriterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_weights, "PATIENCE", 1.0)
    with writing(VllmWriter, student.folder / "model", processed=True) as other:
        engine = engine_of(server, other, timeout=8.0)
        engine.update_weights(1, student.published(1))
        other.before["/collective_rpc"] = other.kill
        engine.update_weights(2, student.published(2))
        for request, result in zip(requests_of(6), results(engine, requests_of(6)), strict=True):
            assert (result.versions_N == 2).all()
            student.assert_written(request, result)
        other.start()
        end = time.monotonic() + 10
        while other.writer.label == "default" or other.writer.paused:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.kill()  # now the other one has to write everything
        for request, result in zip(requests_of(6), results(engine, requests_of(6)), strict=True):
            assert (result.versions_N == 2).all()
            student.assert_written(request, result)
        engine.close()
        server.start()


@pytest.mark.parametrize(
    "path", ["/pause", "/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/resume", VllmApi.path]
)
def test_a_server_that_restarts_during_an_update(student: Student, server: WriterServer, path: str) -> None:
    """Whatever it has forgotten: what it writes as version 1 is written by version 1."""
    engine = engine_of(server)
    server.before[path] = server.restart
    engine.update_weights(1, student.published(1))
    assert not server.before
    for request, result in zip(requests_of(4), results(engine, requests_of(4)), strict=True):
        assert (result.versions_N == 1).all()
        student.assert_written(request, result)
    engine.close()


def test_a_server_that_restarts_between_its_weights_and_their_label(student: Student, server: WriterServer) -> None:
    """Its first weights must not be taken for those that it had loaded."""
    engine = engine_of(server)

    def then_before_the_label() -> None:
        server.before["/update_weight_version"] = server.restart

    server.before["/reset_prefix_cache"] = then_before_the_label
    engine.update_weights(1, student.published(1))
    assert "/update_weight_version" not in server.before
    for request, result in zip(requests_of(4), results(engine, requests_of(4)), strict=True):
        student.assert_written(request, result)
    engine.close()


def test_half_loaded_weights_write_nothing(student: Student, server: WriterServer) -> None:
    server.writer.seconds = 0.02
    engine = engine_of(server, sampling=Sampling(40, temperature=TEMPERATURE))
    engine.update_weights(1, student.published(1))
    requests = requests_of(4)
    futures = engine.generate(requests)
    wait_for_tokens(server, requests, 2)
    server.failing_loads = 1
    with pytest.raises(ServerError, match=r"loading the weights failed: 500.*out of memory.*stays paused"):
        engine.update_weights(2, student.published(2))
    assert server.writer.paused
    assert not any(future.done() for future in futures)
    engine.update_weights(2, student.published(2))  # a second attempt succeeds, and they go on
    for request, future in zip(requests, futures, strict=True):
        found = future.result(30)
        assert set(found.versions_N.tolist()) == {1, 2}
        student.assert_written(request, found, count=40)
    engine.close()


def test_completions_under_way_go_on_with_new_weights(student: Student, server: WriterServer) -> None:
    server.writer.seconds = 0.02
    engine = engine_of(server, sampling=Sampling(60, temperature=TEMPERATURE))
    engine.update_weights(1, student.published(1))
    requests = requests_of(5)
    futures = engine.generate(requests)
    for version in (2, 3):
        wait_for_tokens(server, requests, 10 * version)
        engine.update_weights(version, student.published(version))
    for request, future in zip(requests, futures, strict=True):
        found = future.result(30)
        assert set(found.versions_N.tolist()) == {1, 2, 3}
        assert (np.diff(found.versions_N) >= 0).all()
        student.assert_written(request, found, count=60)
    engine.close()


@pytest.mark.slow
def test_a_server_with_other_weights_again_and_again_is_given_up(student: Student, server: WriterServer) -> None:
    def foreign(handler: WriterHandler, content: dict[str, Any]) -> None:
        """Another job gives the server weights after each of ours: only the proof sees our own."""
        if handler.server_state.asked[-1][1]["sampling_params"]["max_tokens"] > PROBE_TOKENS:
            content["choices"][0]["weight_versions"][0]["version"] = "another job's"
        handler.reply(200, content)

    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    server.faults = [foreign] * 99
    [future] = engine.generate(requests_of(1))
    with pytest.raises(ServerError, match="has other weights again and again: expected a server"):
        future.result(60)
    loads = [path for path, _ in server.asked if path == "/collective_rpc"]
    assert len(loads) == 1 + MOST_RESTORED
    engine.close()
