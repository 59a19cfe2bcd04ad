"""A student whose versions are published, and engines whose servers write its completions."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import build
from kit.on_policy_runs import requests
from kit.stub_servers import StubHandler, StubServer, stub_server
from kit.stub_sglang import Sglang
from kit.stub_vllm import Vllm

from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish
from stillhouse.rollout.records import Completion, GenerationRequest, Sampling
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.server_api import ServerApi
from stillhouse.serving.client.sglang import SglangApi
from stillhouse.serving.client.vllm import VllmApi

VOCABULARY, TEMPERATURE = 251, 0.7
RECORDED = Path(__file__).parents[1] / "kit" / "engines"
KINDS: dict[str, tuple[type[StubHandler], type[Any], dict[str, Any]]] = {
    "vllm": (Vllm, VllmApi, {"processed": True}),
    "sglang": (Sglang, SglangApi, {"after_temperature": True}),
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
        completion: Completion,
        temperature: float = TEMPERATURE,
        count: int | None = None,
    ) -> None:
        """Each token's log-probability is the one by the weights of its version."""
        ids_S = torch.from_numpy(np.concatenate([request.prompt_ids, completion.ids_N]).astype(np.int64))
        assert completion.log_probs_N.dtype == np.float32
        assert completion.ids_N.dtype == completion.versions_N.dtype == np.int32
        for version in set(completion.versions_N.tolist()):
            logits_NV = self.models[version](ids_S[None])[0, len(request.prompt_ids) - 1 : -1].double()
            exact_N = (logits_NV / temperature).log_softmax(-1).gather(1, ids_S[-len(logits_NV) :, None])[:, 0]
            is_version_N = completion.versions_N == version
            actual_N, expected_N = completion.log_probs_N[is_version_N], exact_N.numpy()[is_version_N]
            np.testing.assert_allclose(actual_N, expected_N, atol=5e-5, rtol=0)
        assert count is None or len(completion.ids_N) == count

    def assert_all_written(
        self,
        requests: Sequence[GenerationRequest],
        futures: Sequence[Future[Completion]],
        versions: set[int],
        count: int | None = 12,
    ) -> None:
        """Each completion has tokens of each of these versions, and no others."""
        for request, future in zip(requests, futures, strict=True):
            completion = future.result(60)
            assert set(completion.versions_N.tolist()) == versions
            assert (np.diff(completion.versions_N) >= 0).all()
            self.assert_written(request, completion, count=count)


def engine_of(
    *servers: StubServer, sampling: Sampling | None = None, api: ServerApi | None = None, **options: Any
) -> ServedEngine:
    sampling = sampling or Sampling(12, temperature=TEMPERATURE)
    options = {"vocabulary": VOCABULARY, "timeout": 20.0} | options
    return ServedEngine([server.url for server in servers], sampling, api or VllmApi(), **options)


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    return Student(tmp_path_factory.mktemp("student"))


@pytest.fixture
def server(student: Student) -> Iterator[StubServer]:
    with stub_server(Vllm, student.folder / "model", processed=True) as running:
        yield running


@pytest.fixture
def engine(student: Student, server: StubServer) -> Iterator[ServedEngine]:
    """It has given version 1 to the server."""
    with closing(engine_of(server)) as engine:
        engine.update_weights(1, student.published(1))
        yield engine


def requests_of(count: int) -> list[GenerationRequest]:
    return requests([1 + number % 5 for number in range(count)])


def wait_for_tokens(
    server: StubServer, requests: list[GenerationRequest], count: int, which: Callable[[Iterable[bool]], bool] = all
) -> None:
    """Wait until the server has written so many tokens of each request; which=any: of one of them."""
    end = time.monotonic() + 30
    while not which(server.model.progress.get(request.seed, 0) >= count for request in requests):
        assert time.monotonic() < end
        time.sleep(0.01)


def results(engine: ServedEngine, requests: list[GenerationRequest]) -> list[Completion]:
    return [future.result(60) for future in engine.generate(requests)]
