"""`stillhouse serve --generate` as a real process on loopback: its completions, and the replacing of its weights."""

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit.runs import save_model
from kit.serving import GENERATION, Server, load_weights, publish_scaled, slow_down

from stillhouse.data import load_tokenizer
from stillhouse.models import Decoder, eos_ids
from stillhouse.rollout import Completion, GenerationRequest, Sampling
from stillhouse.rollout.generate import Generator
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.client.stillhouse import StillhouseApi
from stillhouse.serving.server.role import model_info

CPU = torch.device("cpu")
CUT = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
PATH = "/inference/v1/generate"
RECORDED = Path(__file__).parents[1] / "kit" / "engines" / "gen_n2.json"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder, "--generate") as running:
        yield running


def prompt(number: int, tokens: int = 0) -> list[int]:
    random = np.random.Generator(np.random.PCG64(number))
    return random.integers(6, 400, size=tokens or 1 + number % 9).tolist()


def ask(server: Server, ids: list[int], **sampling: Any) -> httpx2.Response:
    return server.client.post(PATH, json={"token_ids": ids, "sampling_params": {"logprobs": 0} | sampling})


def choice(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    only: dict[str, Any] = answer.json()["choices"][0]
    return only


def completion_here(folder: Path, ids: list[int], seed: int, sampling: Sampling) -> Completion:
    """The completion in this process."""
    decoder, tokenizer = Decoder.from_pretrained(folder), load_tokenizer(str(folder))
    ends = tuple(sorted({*sampling.eos_ids, *eos_ids(tokenizer, decoder)}))
    generator = Generator(
        decoder, replace(sampling, eos_ids=ends), CPU, vocabulary=len(tokenizer), tokenizer=tokenizer
    )
    return generator.generate([GenerationRequest(0, np.array(ids, dtype=np.int32), seed)], 0)[0]


def assert_same(served: dict[str, Any], expected: Completion) -> None:
    assert served["token_ids"] == expected.ids_N.tolist()
    assert [entry["token_id"] for entry in served["logprobs"]["content"]] == served["token_ids"]
    log_probs = [entry["logprob"] for entry in served["logprobs"]["content"]]
    np.testing.assert_allclose(log_probs, expected.log_probs_N, rtol=0, atol=1e-5)
    assert served["finish_reason"] == expected.finish
    (span,) = served["weight_versions"]
    assert (span["start"], span["end"]) == (0, len(served["token_ids"]))


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, {}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        (CUT, CUT),
        ({"top_k": -1, "stop_token_ids": list(range(100))}, {"eos_ids": tuple(range(100))}),
        ({"stop": ["e", " t"]}, {"stop": ("e", " t")}),
    ],
)
def test_a_served_completion_is_that_of_this_process(
    server: Server, folder: Path, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    for seed in range(4):
        served = choice(ask(server, prompt(seed), seed=seed, max_tokens=12, **options))
        assert_same(served, completion_here(folder, prompt(seed), seed, Sampling(12, **sampling)))
        assert served["weight_versions"][0]["version"] == "default"


def test_requests_that_wait_together_share_batches_and_keep_their_tokens(server: Server, folder: Path) -> None:
    def one(number: int) -> dict[str, Any]:
        temperature = 1.0 - number % 2
        return choice(ask(server, prompt(number), seed=number, max_tokens=1 + number % 13, temperature=temperature))

    with ThreadPoolExecutor(16) as threads:
        completions = list(threads.map(one, range(48)))
    for number, completion in enumerate(completions):
        sampling = Sampling(max_new_tokens=1 + number % 13, temperature=1.0 - number % 2)
        assert_same(completion, completion_here(folder, prompt(number), number, sampling))
    text = server.client.get("/metrics").text
    answered = r'requests_total\{path="/inference/v1/generate",status="200"\}'
    batches, answers = (
        float(re.findall(rf"^stillhouse_{name} (\S+)", text, re.MULTILINE)[0])
        for name in ("batch_tokens_count", answered)
    )
    assert batches < answers


def test_the_answer_has_the_form_of_vllm(server: Server) -> None:
    recorded = json.loads(RECORDED.read_text())
    body = recorded["request"]["json"]
    body["token_ids"] = [token % 400 for token in body["token_ids"]]
    body["sampling_params"]["n"] = 1
    answer = server.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    served, expected = answer.json(), recorded["response"]
    assert served.keys() == expected.keys()
    assert served["usage"].keys() == expected["usage"].keys()
    (first,) = served["choices"]
    assert first.keys() == expected["choices"][0].keys()
    assert first["logprobs"]["content"][0].keys() == expected["choices"][0]["logprobs"]["content"][0].keys()
    assert first["weight_versions"][0].keys() == expected["choices"][0]["weight_versions"][0].keys()
    assert served["prompt_token_ids"] is None
    body["return_token_ids"] = True
    assert server.client.post(PATH, json=body).json()["prompt_token_ids"] == body["token_ids"]
    without = server.client.post(PATH, json={"token_ids": [7], "sampling_params": {"max_tokens": 2}}).json()
    assert without["choices"][0]["logprobs"] is None
    assert without["usage"] == expected["usage"] | {
        "prompt_tokens": 1,
        "completion_tokens": len(without["choices"][0]["token_ids"]),
        "total_tokens": 1 + len(without["choices"][0]["token_ids"]),
    }


def test_requests_without_a_seed_sample_different_tokens(server: Server) -> None:
    assert len({tuple(choice(ask(server, prompt(3), max_tokens=20))["token_ids"]) for _ in range(4)}) == 4


def test_info_describes_the_model(server: Server) -> None:
    info = server.info()
    assert info["generates"] is True
    assert (info["vocabulary"], info["max_tokens"], info["dtype"]) == (400, 128, "float32")
    assert info["eos_token_ids"] == [2]
    assert server.client.get("/v1/models").json()["data"][0]["id"] == info["model"]
    assert server.client.get("/healthz").json() == {"status": "ready"}
    assert server.client.post("/v1/score", json={"token_ids": [[1]]}).status_code == 404


@pytest.mark.parametrize(("named", "expected"), [([9, 7], [2, 7, 9]), (7, [2, 7]), (None, [2])])
def test_both_servers_name_the_same_ends_of_sequence(
    folder: Path, tmp_path: Path, named: Any, expected: list[int]
) -> None:
    """Those of the tokenizer and of the model's generation_config, as everything that writes completions has them."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    info = model_info("model", Decoder.from_pretrained(model), load_tokenizer(str(model)))
    assert info["eos_token_ids"] == expected


# weights


@pytest.mark.slow
def test_a_completion_is_never_of_two_versions(tmp_path: Path) -> None:
    """Completions are asked for all the time while the weights change; each is that of the version that it names."""
    model = save_model(tmp_path / "student", "llama", seed=3)
    folders = {"default": model}
    for version in (1, 2):
        folders[str(version)] = publish_scaled(model, tmp_path / f"of {version}", version, 0.7**version)
    with Server(model, "--generate", hook=slow_down, hook_arguments=(GENERATION, 0.01)) as server:
        ended = threading.Event()

        def keep_asking(worker: int) -> list[tuple[int, dict[str, Any]]]:
            completions: list[tuple[int, dict[str, Any]]] = []
            while not ended.is_set() or len(completions) < 2:
                seed = 100 * worker + len(completions)
                completions.append((seed, choice(ask(server, prompt(seed), seed=seed, max_tokens=12))))
            return completions

        with ThreadPoolExecutor(4) as threads:
            workers = [threads.submit(keep_asking, worker) for worker in range(4)]
            for version in ("1", "2", "1"):
                time.sleep(0.5)
                assert load_weights(server, folders[version], version).status_code == 200
            time.sleep(0.5)
            ended.set()
            completions = [completion for worker in workers for completion in worker.result()]
    versions = [completion["weight_versions"][0]["version"] for _, completion in completions]
    assert {"default", "1", "2"} == set(versions)
    for (seed, completion), version in zip(completions, versions, strict=True):
        assert_same(completion, completion_here(folders[version], prompt(seed), seed, Sampling(12)))


def test_the_client_of_runs_gets_completions_of_the_version_that_it_gave(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "student", "qwen3", tied=True, seed=2)
    sampling = Sampling(max_new_tokens=5, temperature=0.8, stop=("e", " t"), eos_ids=tuple(range(2, 12)))
    requests = [GenerationRequest(at, np.array(prompt(at), dtype=np.int32), seed=at) for at in range(12)]
    with Server(folder, "--generate") as server:
        engine = ServedEngine([server.url], sampling, StillhouseApi(), vocabulary=400, timeout=60)
        for version, factor in ((0, 1.0), (1, 0.7)):
            published = publish_scaled(folder, tmp_path / "weights", version, factor)
            engine.update_weights(version, published)
            completions = [future.result(timeout=60) for future in engine.generate(requests)]
            for seed, completion in enumerate(completions):
                expected = completion_here(published, prompt(seed), seed, sampling)
                assert completion.ids_N.tolist() == expected.ids_N.tolist()
                np.testing.assert_allclose(completion.log_probs_N, expected.log_probs_N, rtol=0, atol=1e-5)
                assert set(completion.versions_N.tolist()) == {version}
                assert completion.finish == expected.finish
            assert {completion.finish for completion in completions} == {"stop", "length"}
        engine.close()
