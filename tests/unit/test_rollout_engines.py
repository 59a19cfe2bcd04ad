"""Servers that write completions: true log-probabilities and versions, nothing by foreign or half-loaded weights."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit.on_policy_runs import write_on_policy_run
from kit.stub_writers import SglangWriter, VllmWriter, WriterServer, writing
from kit.writer_cases import (
    KINDS,
    RECORDED,
    TEMPERATURE,
    VOCABULARY,
    Student,
    engine_of,
    requests_of,
    results,
    wait_for_tokens,
)

from stillhouse.config import ConfigError
from stillhouse.generation.sample import Completion, GenerationRequest, Sampling
from stillhouse.generation.weights import publish
from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, draw_lora
from stillhouse.parallel import single_process_runner
from stillhouse.run.completion_engine import open_engine
from stillhouse.run.session import prepare
from stillhouse.serving.engines.sglang import SglangApi
from stillhouse.serving.engines.vllm import VllmApi
from stillhouse.serving.pool import ServerError


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture
def server(student: Student) -> Iterator[WriterServer]:
    with writing(VllmWriter, student.folder / "model", processed=True) as started:
        yield started


@pytest.mark.parametrize(
    "kind", [kind if kind == "vllm" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_log_probabilities_are_those_of_the_version(student: Student, kind: str) -> None:
    handler, api, options = KINDS[kind]
    eos = tuple(range(0, VOCABULARY, 9))
    with (
        writing(handler, student.folder / "model", **options) as one,
        writing(handler, student.folder / "model", **options) as two,
    ):
        engine = engine_of(one, two, sampling=Sampling(12, temperature=TEMPERATURE, eos_ids=eos), api=api())
        finishes = set()
        for version in (1, 2):
            engine.update_weights(version, student.published(version))
            requests = requests_of(12)
            found = results(engine, requests)
            for request, each in zip(requests, found, strict=True):
                assert (each.versions_N == version).all()
                student.assert_written(request, each)
                assert (each.finish == "stop") == (each.ids_N[-1] in eos)
                assert not set(each.ids_N[:-1].tolist()) & set(eos)
                assert each.finish == "stop" or len(each.ids_N) == 12
                finishes.add(each.finish)
            again = results(engine, requests)  # from whichever server: a seed gives the same tokens
            assert all(np.array_equal(a.ids_N, b.ids_N) for a, b in zip(found, again, strict=True))
        assert finishes == {"stop", "length"}
        generates = [sum(path == api.path for path, _ in each.asked) for each in (one, two)]
        assert min(generates) > 5
        engine.close()


def test_the_stub_answers_in_the_recorded_forms(student: Student, server: WriterServer) -> None:
    def assert_form(found: Any, recorded: Any) -> None:
        assert type(found) is type(recorded)
        if isinstance(found, dict):
            assert found.keys() <= recorded.keys()
            for name, each in found.items():
                assert_form(each, recorded[name])
        elif isinstance(found, list):
            assert_form(found[0], recorded[0])

    sampling = Sampling(3, temperature=1.0)
    body = VllmApi().body("t", [5, 17, 250], sampling, 3, 1, top=2)
    recorded = json.loads((RECORDED / "gen.json").read_text())
    found = httpx2.post(server.url + VllmApi.path, json=body).json()
    assert_form(found, recorded["response"])
    student_paths = {"weights/step-7": str(student.published(1))}
    for name in ("pause", "update_weight_version", "reload", "is_paused", "resume"):
        call = json.loads((RECORDED / f"{name}.json").read_text())
        request = call["request"]
        if name == "reload":
            request["json"]["kwargs"]["weights_path"] = student_paths["weights/step-7"]
        answer = httpx2.request(
            request["method"], server.url + request["path"], params=request["params"], json=request["json"] or {}
        )
        assert answer.status_code == call["status"] == 200
        assert answer.json() == call["response"]


def test_recorded_completions_of_a_real_vllm_are_read() -> None:
    recorded = json.loads((RECORDED / "gen.json").read_text())["response"]
    found = VllmApi().parse(httpx2.Response(200, json=recorded), "model")
    assert found.ids == [20, 980, 374]
    assert found.log_probs == [-0.7838290333747864, -5.419886589050293, -4.160661220550537]
    assert found.finish == "length"
    assert [(each.label, each.start, each.end) for each in found.spans] == [("default", 0, 3)]
    top = VllmApi().top_log_probs(httpx2.Response(200, json=recorded))
    assert top == [-0.7838290333747864, -2.5308964252471924]

    recorded = json.loads((RECORDED / "gen_not_likeliest.json").read_text())  # the drawn token has rank 893
    assert recorded["request"]["json"] == VllmApi().body("student", [2, 3], Sampling(1, temperature=2.0), 1, 0, top=2)
    top = VllmApi().top_log_probs(httpx2.Response(200, json=recorded["response"]))
    assert top[:2] == [-6.712759017944336, -6.830646514892578]
    labelled = json.loads((RECORDED / "gen_versions.json").read_text())["response"]
    [span] = VllmApi().parse(httpx2.Response(200, json=labelled), "model").spans
    assert span.label == "step-7"


def test_sglangs_completions_under_way_are_written_again(student: Student) -> None:
    with writing(SglangWriter, student.folder / "model", after_temperature=True, seconds=0.02) as server:
        engine = engine_of(server, sampling=Sampling(40, temperature=TEMPERATURE), api=SglangApi())
        engine.update_weights(1, student.published(1))
        requests = requests_of(5)
        futures = engine.generate(requests)
        wait_for_tokens(server, requests, 5)
        engine.update_weights(2, student.published(2))
        for request, future in zip(requests, futures, strict=True):
            found = future.result(30)
            assert (found.versions_N == 2).all()
            student.assert_written(request, found, count=40)
        engine.close()


@pytest.mark.parametrize(
    ("options", "sampling", "match"),
    [
        ({"processed": False}, Sampling(8, temperature=0.7), "before the temperature, and the temperature is 0.7"),
        ({"processed": True}, Sampling(8, top_k=5), "among the tokens that top_p, top_k and min_p leave"),
        ({"processed": True}, Sampling(8, temperature=0.7, top_p=0.9), "among the tokens that top_p"),
        ({"processed": False}, Sampling(8, temperature=0.7, min_p=0.1), "before the temperature"),
        ({"processed": False}, Sampling(8), ""),
        ({"processed": True}, Sampling(8), ""),
        ({"processed": False}, Sampling(8, top_k=5), ""),
        ({"processed": True}, Sampling(8, temperature=1.5), ""),
        ({"processed": True}, Sampling(8, temperature=0.3), ""),
        ({"processed": True}, Sampling(8, temperature=2.0), ""),
        ({"processed": False}, Sampling(8, temperature=2.0), "before the temperature, and the temperature is 2"),
        ({"processed": False}, Sampling(8, temperature=0.0), ""),
        ({"after_temperature": True}, Sampling(8, temperature=0.7, top_k=5), ""),
    ],
)
def test_other_log_probabilities_are_refused(
    student: Student, options: dict[str, Any], sampling: Sampling, match: str
) -> None:
    with writing(VllmWriter, student.folder / "model", **options) as server:
        if match:
            with pytest.raises(ValueError, match=match):
                engine_of(server, sampling=sampling)
        else:
            engine_of(server, sampling=sampling).close()


@pytest.mark.parametrize(
    ("device", "match"), [("cpu", "is a vLLM on a CPU.*keeps the first output head"), ("cuda", ""), (None, "tell")]
)
def test_a_vllm_that_keeps_the_first_head_of_a_tied_student_is_refused(
    student: Student, device: str | None, match: str
) -> None:
    with writing(VllmWriter, student.folder / "model", processed=True, device=device) as server:
        engine_of(server, api=VllmApi()).close()  # the student has a head of its own
        if match:
            with pytest.raises(ValueError, match=match):
                engine_of(server, api=VllmApi(is_tied=True))
        else:
            engine_of(server, api=VllmApi(is_tied=True)).close()


def test_a_run_with_a_tied_student_is_refused_before_its_first_step(tmp_path: Path) -> None:
    """With an adapter it is not: the server's own base stays as it is."""
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1"}
    write_on_policy_run(tmp_path, tied=True, **settings)  # the student, which the server has from the start
    with writing(VllmWriter, tmp_path / "student", processed=True) as server:
        settings["rollout.url"] = server.url
        with closing(prepare(write_on_policy_run(tmp_path, **settings), announce=False)) as session:
            assert session.rollout_config is not None
            with pytest.raises(ConfigError, match="is a vLLM on a CPU") as raised:
                open_engine(session, session.rollout_config)
        assert raised.value.key == "rollout.url"
        settings["student.adapter"] = {"r": 4}
        with closing(prepare(write_on_policy_run(tmp_path, **settings), announce=False)) as session:
            assert session.rollout_config is not None
            engine = open_engine(session, session.rollout_config)
            assert engine is not None
            engine.close()


def test_a_model_that_proves_nothing_is_refused(student: Student, server: WriterServer) -> None:
    with torch.no_grad():
        server.writer.model.get_output_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="it cannot be proved which log-probabilities it gives"):
        engine_of(server)


def test_ids_outside_of_the_vocabulary_are_not_sent(student: Student, server: WriterServer) -> None:
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    before = len(server.asked)
    for ids in ([], [3, VOCABULARY], [-1]):
        with pytest.raises(ValueError, match="completion 7: its prompt has"):
            engine.generate([*requests_of(1), GenerationRequest(7, np.array(ids, np.int32), 0)])
    assert len(server.asked) == before
    engine.close()


def test_a_request_may_ask_for_fewer_tokens(student: Student, server: WriterServer) -> None:
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    for wanted, count in ((3, 3), (99, 12)):
        [request] = requests_of(1)
        request = GenerationRequest(0, request.prompt_ids, 0, wanted)
        student.assert_written(request, results(engine, [request])[0], count=count)
    engine.close()


def test_what_is_not_published_is_refused(student: Student, server: WriterServer) -> None:
    engine = engine_of(server)
    with pytest.raises(ValueError, match="expected update_weights first"):
        engine.generate(requests_of(1))
    with pytest.raises(ValueError, match="expected the one that was published"):
        engine.update_weights(1, None)
    with pytest.raises(ValueError, match="is no complete version of the weights"):
        engine.update_weights(1, student.folder / "model")
    with pytest.raises(ValueError, match="holds version 2: expected 1"):
        engine.update_weights(1, student.published(2))
    assert not [path for path, _ in server.asked if path.startswith("/pause")]
    engine.close()


def test_a_vllm_without_the_routes_is_refused(student: Student, server: WriterServer) -> None:
    server.kind = SglangWriter  # any server without these routes
    server.restart()
    with pytest.raises(ValueError, match=r"/v1/models names no model.*--enable-scale-out"):
        engine_of(server)
    server.kind = type("Closed", (VllmWriter,), {"post_pause": None})
    server.restart()
    engine = engine_of(server)
    with pytest.raises(ServerError, match=r"/pause\?mode=keep failed: 404.*VLLM_SERVER_DEV_MODE=1"):
        engine.update_weights(1, student.published(1))
    engine.close()


def test_closing_ends_what_is_under_way(student: Student, server: WriterServer) -> None:
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    server.writer.seconds = 0.5
    futures = engine.generate(requests_of(3))
    engine.close()
    for each in futures:
        with pytest.raises(ServerError, match="the run ends"):
            each.result(10)
    with pytest.raises(ServerError, match="the run ends"):
        engine.generate(requests_of(1))[0].result(10)


class Adapters:
    def __init__(self, student: Student, folder: Path):
        self.student = Decoder.from_pretrained(student.folder / "model")
        add_lora(self.student, r=4, alpha=8, base=str(student.folder / "model"))
        self.folder = folder

    def version(self, version: int) -> Path:
        draw_lora(self.student, version, fresh=False)
        return publish(single_process_runner(self.student, None), self.folder, version)


def test_adapters_are_changed_while_completions_are_under_way(student: Student, tmp_path: Path) -> None:
    adapters = Adapters(student, tmp_path)
    with writing(VllmWriter, student.folder / "model", processed=True, takes_adapters=True, seconds=0.01) as server:
        engine = engine_of(server)
        for version in (1, 2):
            engine.update_weights(version, adapters.version(version))
            student.models[10 + version] = adapters.student
            for request, each in zip(requests_of(4), results(engine, requests_of(4)), strict=True):
                assert (each.versions_N == version).all()
                moved = Completion(each.ids_N, each.log_probs_N, each.versions_N + 10, each.finish)
                student.assert_written(request, moved)
        assert len(server.writer.adapters) == 1
        server.writer.progress.clear()
        futures = engine.generate(requests_of(4))
        wait_for_tokens(server, requests_of(4), 1)
        server.restart()  # it has no adapters any more
        for request, future in zip(requests_of(4), futures, strict=True):
            found = future.result(30)
            assert (found.versions_N == 2).all()
            moved = Completion(found.ids_N, found.log_probs_N, found.versions_N + 10, found.finish)
            student.assert_written(request, moved)
        assert not [path for path, _ in server.asked if path.startswith(("/pause", "/collective_rpc"))]
        engine.close()


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_server_without_adapters_is_refused(student: Student, tmp_path: Path, kind: str) -> None:
    path = Adapters(student, tmp_path).version(1)
    handler, api, options = KINDS[kind]
    with writing(handler, student.folder / "model", **options) as server:
        engine = engine_of(server, api=api())
        with pytest.raises((ValueError, ServerError), match=r"--enable-lora|the student is an adapter: expected"):
            engine.update_weights(1, path)
        engine.close()


def test_generating_returns_at_once(student: Student, server: WriterServer) -> None:
    server.writer.seconds = 0.05
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    running = threading.Event()
    futures = engine.generate(requests_of(2))
    assert not any(each.done() for each in futures)
    futures[0].add_done_callback(lambda _: running.set())
    assert running.wait(20)
    engine.close()
