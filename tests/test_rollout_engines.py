"""Servers that write completions: true log-probabilities and versions, nothing by foreign or half-loaded weights."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from families import build
from stub_writers import Fault, SglangWriter, StillhouseWriter, VllmWriter, WriterHandler, WriterServer, writing

from stillhouse.models import Decoder
from stillhouse.models.adapter import add_lora, draw_lora
from stillhouse.parallel import single_process_runner
from stillhouse.rollouts import http
from stillhouse.rollouts.api import EngineApi
from stillhouse.rollouts.http import MOST_RESTORED, ServedEngine
from stillhouse.rollouts.sample import Completion, GenerationRequest, Sampling
from stillhouse.rollouts.sglang import SglangApi
from stillhouse.rollouts.stillhouse_client import StillhouseApi
from stillhouse.rollouts.vllm import VllmApi
from stillhouse.rollouts.weights import publish
from stillhouse.teachers.client.pool import ServerError

VOCABULARY, TEMPERATURE = 251, 0.7
RECORDED = Path(__file__).parent / "engines"
KINDS: dict[str, tuple[type[WriterHandler], type[Any], dict[str, Any]]] = {
    "vllm": (VllmWriter, VllmApi, {"processed": True}),
    "sglang": (SglangWriter, SglangApi, {"after_temperature": True}),
    "stillhouse": (StillhouseWriter, StillhouseApi, {"after_temperature": True}),
}


class Student:
    """A student whose weights change with each version, and the folders in which they are published."""

    def __init__(self, folder: Path):
        self.folder = folder
        build("llama").save_pretrained(folder / "model")
        self.decoder = Decoder.from_pretrained(folder / "model")
        self.models: dict[int, Decoder] = {}
        for version in range(4):
            with torch.no_grad():
                for parameter in self.decoder.parameters():
                    parameter.mul_(1.1).add_(0.02)
            publish(single_process_runner(self.decoder, None), folder / f"weights {version}", version)
            self.models[version] = Decoder.from_pretrained(self.published(version))

    def published(self, version: int) -> Path:
        return self.folder / f"weights {version}" / f"version-{version:08d}"

    @torch.no_grad()
    def assert_written(
        self,
        request: GenerationRequest,
        found: Completion,
        temperature: float = TEMPERATURE,
        count: int | None = None,
    ) -> None:
        """Each token's log-probability is the one by the weights of its version."""
        ids_S = torch.from_numpy(np.concatenate([request.prompt_ids, found.ids_N]).astype(np.int64))
        assert found.log_probs_N.dtype == np.float32
        assert found.ids_N.dtype == found.versions_N.dtype == np.int32
        for version in set(found.versions_N.tolist()):
            logits_NV = self.models[version](ids_S[None])[0, len(request.prompt_ids) - 1 : -1].double()
            exact_N = (
                (logits_NV / temperature).log_softmax(-1).gather(1, ids_S[len(request.prompt_ids) :, None])[:, 0]
            )
            own_N = found.versions_N == version
            np.testing.assert_allclose(found.log_probs_N[own_N], exact_N.numpy()[own_N], atol=5e-5, rtol=0)
        assert count is None or len(found.ids_N) == count


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture
def server(student: Student) -> Iterator[WriterServer]:
    with writing(VllmWriter, student.folder / "model", processed=True) as started:
        yield started


def engine_of(
    *servers: WriterServer, sampling: Sampling | None = None, api: EngineApi | None = None, **options: Any
) -> ServedEngine:
    sampling = sampling or Sampling(12, temperature=TEMPERATURE)
    given = {"vocabulary": VOCABULARY, "timeout": 20.0} | options
    return ServedEngine([each.url for each in servers], sampling, api or VllmApi(), **given)


def requests_of(count: int) -> list[GenerationRequest]:
    draws = np.random.default_rng(0)
    prompts = [draws.integers(0, VOCABULARY, 1 + number % 5).astype(np.int32) for number in range(count)]
    return [GenerationRequest(number, each, seed=1 + number) for number, each in enumerate(prompts)]


def wait_for_tokens(
    server: WriterServer, requests: list[GenerationRequest], count: int, which: Callable[[Iterable[bool]], bool] = all
) -> None:
    """Wait until the server has written so many tokens of each request; which=any: of one of them."""
    end = time.monotonic() + 30
    while not which(server.writer.progress.get(each.seed, 0) >= count for each in requests):
        assert time.monotonic() < end
        time.sleep(0.01)


def results(engine: ServedEngine, requests: list[GenerationRequest]) -> list[Completion]:
    return [each.result(60) for each in engine.generate(requests)]


@pytest.mark.parametrize("kind", list(KINDS))
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
    labelled = json.loads((RECORDED / "gen_versions.json").read_text())["response"]
    [span] = VllmApi().parse(httpx2.Response(200, json=labelled), "model").spans
    assert span.label == "step-7"


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
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    server.faults = [fault] * (40 if fault is busy else 3)
    requests = requests_of(6)
    for request, each in zip(requests, results(engine, requests), strict=True):
        student.assert_written(request, each, count=12)
        assert (each.versions_N == 1).all()
    assert not server.faults
    engine.close()


@pytest.mark.parametrize("fault", list(DAMAGED), ids=lambda fault: fault.__name__)
def test_answers_that_are_damaged_every_time_end_the_run(
    student: Student, server: WriterServer, fault: Fault
) -> None:
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
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
    server.options["seconds"] = server.writer.seconds = 0.05
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
    monkeypatch.setattr(http, "PATIENCE", 1.0)
    with writing(VllmWriter, student.folder / "model", processed=True) as other:
        engine = engine_of(server, other, timeout=8.0)
        engine.update_weights(1, student.published(1))
        other.before["/collective_rpc"] = other.kill
        engine.update_weights(2, student.published(2))
        for request, each in zip(requests_of(6), results(engine, requests_of(6)), strict=True):
            assert (each.versions_N == 2).all()
            student.assert_written(request, each)
        other.start()
        end = time.monotonic() + 10
        while other.writer.label == "default" or other.writer.paused:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.kill()  # now the other one has to write everything
        for request, each in zip(requests_of(6), results(engine, requests_of(6)), strict=True):
            assert (each.versions_N == 2).all()
            student.assert_written(request, each)
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
    for request, each in zip(requests_of(4), results(engine, requests_of(4)), strict=True):
        assert (each.versions_N == 1).all()
        student.assert_written(request, each)
    engine.close()


def test_a_server_that_restarts_between_its_weights_and_their_label(student: Student, server: WriterServer) -> None:
    """Its first weights must not be taken for those that it had loaded."""
    engine = engine_of(server)

    def then_before_the_label() -> None:
        server.before["/update_weight_version"] = server.restart

    server.before["/reset_prefix_cache"] = then_before_the_label
    engine.update_weights(1, student.published(1))
    assert "/update_weight_version" not in server.before
    for request, each in zip(requests_of(4), results(engine, requests_of(4)), strict=True):
        student.assert_written(request, each)
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
    assert not any(each.done() for each in futures)
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


def test_a_server_with_other_weights_again_and_again_is_given_up(student: Student, server: WriterServer) -> None:
    def foreign(handler: WriterHandler, content: dict[str, Any]) -> None:
        """Another job gives the server weights after each of ours: only the proof sees our own."""
        if handler.server_state.asked[-1][1]["sampling_params"]["max_tokens"] > 1:
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
    server.writer.seconds = 0.2
    engine = engine_of(server)
    engine.update_weights(1, student.published(1))
    running = threading.Event()
    futures = engine.generate(requests_of(2))
    assert not any(each.done() for each in futures)
    futures[0].add_done_callback(lambda _: running.set())
    assert running.wait(20)
    engine.close()
