"""Servers that write completions: true log-probabilities and versions, nothing by foreign or half-loaded weights."""

import json
from contextlib import closing
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit import first_is_quick
from kit.config_cases import refused_calls
from kit.on_policy_runs import write_on_policy_run
from kit.runs import wait_for
from kit.stub_servers import StubServer, stub_server
from kit.stub_sglang import Sglang
from kit.stub_vllm import Vllm
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
from stillhouse.config.servers import ServerError
from stillhouse.loops.rollouts import open_servers
from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, initialize_lora
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish
from stillhouse.rollout.records import GenerationRequest, Sampling
from stillhouse.run.run import prepare
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.sglang import SglangApi
from stillhouse.serving.client.vllm import VllmApi


@pytest.mark.parametrize("kind", first_is_quick(KINDS))
def test_log_probabilities_are_those_of_the_version(student: Student, kind: str) -> None:
    handler, api, options = KINDS[kind]
    eos = tuple(range(0, VOCABULARY, 9))
    sampling = Sampling(12, temperature=TEMPERATURE, eos_ids=eos)
    with (
        stub_server(handler, student.folder / "model", **options) as one,
        stub_server(handler, student.folder / "model", **options) as two,
        closing(engine_of(one, two, sampling=sampling, api=api())) as engine,
    ):
        finishes = set()
        for version in (1, 2):
            engine.update_weights(version, student.published(version))
            requests = requests_of(12)
            futures = engine.generate(requests)
            student.assert_all_written(requests, futures, {version}, count=None)
            completions = [future.result() for future in futures]
            for completion in completions:
                assert (completion.finish == "stop") == (completion.ids_N[-1] in eos)
                assert not set(completion.ids_N[:-1].tolist()) & set(eos)
                assert completion.finish == "stop" or len(completion.ids_N) == 12
                finishes.add(completion.finish)
            again = results(engine, requests)  # from whichever server: a seed gives the same tokens
            assert all(np.array_equal(a.ids_N, b.ids_N) for a, b in zip(completions, again, strict=True))
        assert finishes == {"stop", "length"}
        generates = [sum(path == api.path for path, _ in server.requests) for server in (one, two)]
        assert min(generates) > 5


def test_the_stub_answers_in_the_recorded_forms(student: Student, server: StubServer) -> None:
    def assert_form(answer: Any, recorded: Any) -> None:
        assert type(answer) is type(recorded)
        if isinstance(answer, dict):
            assert answer.keys() <= recorded.keys()
            for name, value in answer.items():
                assert_form(value, recorded[name])
        elif isinstance(answer, list):
            assert_form(answer[0], recorded[0])

    body = VllmApi().body("t", [5, 17, 250], Sampling(3, temperature=1.0), 3, 1, top=2)
    recorded = json.loads((RECORDED / "gen.json").read_text())
    assert_form(httpx2.post(server.url + VllmApi.path, json=body).json(), recorded["response"])
    for name in ("pause", "update_weight_version", "reload", "is_paused", "resume"):
        call = json.loads((RECORDED / f"{name}.json").read_text())
        request = call["request"]
        if name == "reload":
            request["json"]["kwargs"]["weights_path"] = str(student.published(1))
        options = {"params": request["params"], "json": request["json"] or {}}
        answer = httpx2.request(request["method"], server.url + request["path"], **options)
        assert answer.status_code == call["status"] == 200
        assert answer.json() == call["response"]


def test_recorded_completions_of_a_real_vllm_are_read() -> None:
    recorded = json.loads((RECORDED / "gen.json").read_text())["response"]
    answer = VllmApi().parse(HttpAnswer(200, json.dumps(recorded).encode()))
    assert answer.ids == [20, 980, 374]
    assert answer.log_probs == [-0.7838290333747864, -5.419886589050293, -4.160661220550537]
    assert answer.finish == "length"
    assert [(span.label, span.start, span.end) for span in answer.spans] == [("default", 0, 3)]
    top = VllmApi().top_log_probs(HttpAnswer(200, json.dumps(recorded).encode()))
    assert top == [-0.7838290333747864, -2.5308964252471924]

    recorded = json.loads((RECORDED / "gen_unlikely_token.json").read_text())  # the sampled token has rank 893
    assert recorded["request"]["json"] == VllmApi().body("student", [2, 3], Sampling(1, temperature=2.0), 1, 0, top=2)
    top = VllmApi().top_log_probs(HttpAnswer(200, json.dumps(recorded["response"]).encode()))
    assert top[:2] == [-6.712759017944336, -6.830646514892578]
    labelled = json.loads((RECORDED / "gen_versions.json").read_text())["response"]
    [span] = VllmApi().parse(HttpAnswer(200, json.dumps(labelled).encode())).spans
    assert span.label == "step-7"


def test_sglangs_completions_under_way_are_written_again(student: Student) -> None:
    sampling = Sampling(40, temperature=TEMPERATURE)
    with (
        stub_server(Sglang, student.folder / "model", after_temperature=True, seconds=0.02) as server,
        closing(engine_of(server, sampling=sampling, api=SglangApi())) as engine,
    ):
        engine.update_weights(1, student.published(1))
        requests = requests_of(5)
        futures = engine.generate(requests)
        wait_for_tokens(server, requests, 5)
        engine.update_weights(2, student.published(2))
        student.assert_all_written(requests, futures, {2}, count=40)


TIED = {"is_tied": True}


@pytest.mark.parametrize(("call", "message"), refused_calls("engines that generate"))
def test_a_vllm_that_gives_other_log_probabilities_is_refused(student: Student, call: str, message: str) -> None:
    options, sampling, api = eval(call)
    with stub_server(Vllm, student.folder / "model", **options) as server:
        if message:
            with pytest.raises(ValueError, match=message):
                engine_of(server, sampling=sampling, api=VllmApi(**api))
        else:
            engine_of(server, sampling=sampling, api=VllmApi(**api)).close()


def test_a_run_with_a_tied_student_is_refused_before_its_first_step(tmp_path: Path) -> None:
    """With an adapter it is not: the server's own base stays as it is."""
    settings: dict[str, Any] = {"data.eval": 0.0, "rollout.engine": "vllm", "rollout.url": "http://127.0.0.1:1"}
    write_on_policy_run(tmp_path, tied=True, **settings)  # the student, which the server has from the start
    with stub_server(Vllm, tmp_path / "student", processed=True) as server:
        settings["rollout.url"] = server.url
        with closing(prepare(write_on_policy_run(tmp_path, **settings), announce=False)) as session:
            assert session.rollout.config is not None
            with pytest.raises(ConfigError, match="is a vLLM on a CPU") as raised:
                open_servers(session)
        assert raised.value.key == "rollout.url"
        settings["student.adapter"] = {"r": 4}
        with closing(prepare(write_on_policy_run(tmp_path, **settings), announce=False)) as session:
            assert session.rollout.config is not None
            engine = open_servers(session)
            assert engine is not None
            engine.close()


def test_requests_are_checked_and_may_ask_for_fewer_tokens(
    server: StubServer, engine: ServedEngine, student: Student
) -> None:
    before = len(server.requests)
    for ids in ([], [3, VOCABULARY], [-1]):
        with pytest.raises(ValueError, match="completion 7: its prompt has"):
            engine.generate([*requests_of(1), GenerationRequest(7, np.array(ids, np.int32), 0)])
    assert len(server.requests) == before
    for most, count in ((3, 3), (99, 12)):
        requests = [replace(request, max_new_tokens=most) for request in requests_of(1)]
        student.assert_all_written(requests, engine.generate(requests), {1}, count)


def test_what_is_not_published_proven_or_routed_is_refused(student: Student, server: StubServer) -> None:
    with closing(engine_of(server)) as engine:
        with pytest.raises(ValueError, match="expected update_weights first"):
            engine.generate(requests_of(1))
        for folder, message in (
            (None, "expected the folder of a published version"),
            (student.folder / "model", "is no complete version of the weights"),
            (student.published(2), "holds version 2: expected 1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.update_weights(1, folder)
    assert not [path for path, _ in server.requests if path.startswith("/pause")]
    server.kind = type("Other", (Sglang,), {"get_v1_models": None})  # any server without these routes
    server.restart()
    with pytest.raises(ValueError, match=r"/v1/models names no model.*--enable-scale-out"):
        engine_of(server)
    server.kind = type("Closed", (Vllm,), {"post_pause": None})
    server.restart()
    message = r"/pause\?mode=keep failed: 404.*VLLM_SERVER_DEV_MODE=1"
    with closing(engine_of(server)) as engine, pytest.raises(ServerError, match=message):
        engine.update_weights(1, student.published(1))
    with torch.no_grad():
        server.model.model.get_output_embeddings().weight.zero_()
    with pytest.raises(ValueError, match="its kind of log-probabilities cannot be proved"):
        engine_of(server)


def test_generating_returns_at_once_and_closing_ends_it(server: StubServer, engine: ServedEngine) -> None:
    server.model.seconds = 0.5
    futures = engine.generate(requests_of(3))
    assert not any(future.done() for future in futures)
    engine.close()
    for future in [*futures, *engine.generate(requests_of(1))]:
        with pytest.raises(ServerError, match="the run ends"):
            future.result(10)


class Adapters:
    def __init__(self, student: Student, folder: Path):
        self.student = Decoder.from_pretrained(student.folder / "model")
        add_lora(self.student, r=4, alpha=8, base=str(student.folder / "model"))
        self.folder = folder

    def version(self, version: int, run: str = "") -> Path:
        initialize_lora(self.student, version, fresh=False)
        return publish(single_process_runner(self.student, None), self.folder, version, run=run)


@pytest.mark.parametrize("kind", first_is_quick(KINDS))
def test_adapters_are_changed_while_completions_are_under_way(student: Student, tmp_path: Path, kind: str) -> None:
    student = copy(student)
    student.models = {}
    adapters, requests = Adapters(student, tmp_path), requests_of(4)
    handler, api, options = KINDS[kind]
    with (
        stub_server(handler, student.folder / "model", takes_adapters=True, seconds=0.01, **options) as server,
        closing(engine_of(server, api=api())) as engine,
    ):
        for version in (1, 2):
            engine.update_weights(version, adapters.version(version))
            student.models[version] = adapters.student
            student.assert_all_written(requests, engine.generate(requests), {version})
        wait_for(lambda: len(server.model.adapters) == 1)
        server.model.progress.clear()
        futures = engine.generate(requests)
        wait_for_tokens(server, requests, 1)
        server.restart()  # it has no adapters any more
        student.assert_all_written(requests, futures, {2})
        server.model.progress.clear()
        server.model.seconds = 0.05
        futures = engine.generate(requests)
        wait_for_tokens(server, requests, 1)
        adapters.student = deepcopy(adapters.student)
        engine.update_weights(3, adapters.version(3))  # a completion under way keeps its adapter
        student.models[3] = adapters.student
        student.assert_all_written(requests, futures, {2})
        student.assert_all_written(requests, engine.generate(requests), {3})
        wait_for(lambda: len(server.model.adapters) == 1)
        routes = ("/pause", "/collective_rpc", "/update_weights")
        assert not [path for path, _ in server.requests if path.startswith(routes)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_drops_only_what_an_earlier_process_of_it_has_left(student: Student, tmp_path: Path, kind: str) -> None:
    version = Adapters(student, tmp_path).version(1, run="one")
    handler, api, options = KINDS[kind]
    with (
        stub_server(handler, student.folder / "model", takes_adapters=True, **options) as server,
        closing(engine_of(server, api=api(), run="one")) as killed,
    ):
        killed.update_weights(1, version)
        adapters, paths = server.model.adapters, server.model.paths
        [left] = adapters
        assert left.startswith("stillhouse-one-")
        others = {"stillhouse-two-12345678-1-0", "stillhouse-one", "one", "t-one"}
        for name in others:
            adapters[name], paths[name] = adapters[left], version
        with closing(engine_of(server, api=api(), run="one")) as engine:
            assert adapters.keys() == others
            engine.update_weights(1, version)
            assert adapters.keys() > others
        assert adapters.keys() == others


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_server_without_adapters_is_refused(student: Student, tmp_path: Path, kind: str) -> None:
    path = Adapters(student, tmp_path).version(1)
    handler, api, options = KINDS[kind]
    with (
        stub_server(handler, student.folder / "model", **options) as server,
        closing(engine_of(server, api=api())) as engine,
        pytest.raises(ServerError, match=r"loading the adapter failed: 4.*--enable-lora, --max-lora-rank"),
    ):
        engine.update_weights(1, path)
