"""`stillhouse serve --generate` as a real process on loopback: its completions, and the replacing of its weights."""

import hashlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit.runs import save_model
from kit.serving import Server, load_weights, publish_scaled, slow_generation
from safetensors.torch import load_file, save_file

from stillhouse.data import load_tokenizer
from stillhouse.generation import Completion, GenerationRequest, Sampling
from stillhouse.generation.generate import Generator
from stillhouse.models import Decoder, eos_ids
from stillhouse.serving.client.served_engine import ServedEngine
from stillhouse.serving.engines.stillhouse import StillhouseApi
from stillhouse.serving.server.run_server import serve

CPU = torch.device("cpu")
PATH = "/inference/v1/generate"
RECORDED = Path(__file__).parents[1] / "kit" / "engines" / "gen_n2.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "student", "qwen3", seed=2)


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
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def own(folder: Path, ids: list[int], seed: int, sampling: Sampling) -> Completion:
    """The completion in this process."""
    decoder, tokenizer = Decoder.from_pretrained(folder), load_tokenizer(str(folder))
    ends = tuple(sorted({*sampling.eos_ids, *eos_ids(tokenizer, decoder)}))
    drawn = Sampling(**{**sampling.__dict__, "eos_ids": ends})
    generator = Generator(decoder, drawn, CPU, vocabulary=len(tokenizer), tokenizer=tokenizer)
    return generator.generate([GenerationRequest(0, np.array(ids, dtype=np.int32), seed)], 0)[0]


def assert_same(found: dict[str, Any], expected: Completion) -> None:
    assert found["token_ids"] == expected.ids_N.tolist()
    assert [each["token_id"] for each in found["logprobs"]["content"]] == found["token_ids"]
    values = [each["logprob"] for each in found["logprobs"]["content"]]
    np.testing.assert_allclose(values, expected.log_probs_N, rtol=0, atol=1e-5)
    assert found["finish_reason"] == expected.finish
    (span,) = found["weight_versions"]
    assert (span["start"], span["end"]) == (0, len(found["token_ids"]))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"top_k": -1, "stop_token_ids": list(range(100))},
        {"stop": ["e", " t"]},
    ],
    ids=str,
)
def test_a_served_completion_is_that_of_this_process(server: Server, folder: Path, asked: dict[str, Any]) -> None:
    renamed = {"stop_token_ids": "eos_ids"}
    given = {
        renamed.get(name, name): tuple(value) if isinstance(value, list) else value for name, value in asked.items()
    }
    sampling = Sampling(max_new_tokens=12, **{**given, "top_k": max(0, asked.get("top_k", 0))})
    for seed in range(4):
        found = choice(ask(server, prompt(seed), seed=seed, max_tokens=12, **asked))
        assert_same(found, own(folder, prompt(seed), seed, sampling))
        assert found["weight_versions"][0]["version"] == "default"


def test_requests_that_wait_together_share_batches_and_keep_their_draws(server: Server, folder: Path) -> None:
    def one(number: int) -> dict[str, Any]:
        return choice(
            ask(server, prompt(number), seed=number, max_tokens=1 + number % 13, temperature=1.0 - number % 2)
        )

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(one, range(48)))
    for number, each in enumerate(found):
        sampling = Sampling(max_new_tokens=1 + number % 13, temperature=1.0 - number % 2)
        assert_same(each, own(folder, prompt(number), number, sampling))
    text = server.client.get("/metrics").text
    batches = float(re.findall(r"^stillhouse_batch_tokens_count (\S+)", text, re.MULTILINE)[0])
    answers = float(
        re.findall(
            r'^stillhouse_requests_total\{path="(?:/inference/v1/generate)",status="200"\} (\S+)', text, re.MULTILINE
        )[0]
    )
    assert batches < answers


def test_the_answer_has_the_form_of_vllm(server: Server) -> None:
    recorded = json.loads(RECORDED.read_text())
    body = recorded["request"]["json"]
    body["token_ids"] = [each % 400 for each in body["token_ids"]]
    body["sampling_params"]["n"] = 1
    answer = server.client.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    found, expected = answer.json(), recorded["response"]
    assert found.keys() == expected.keys()
    assert found["usage"].keys() == expected["usage"].keys()
    (first,) = found["choices"]
    assert first.keys() == expected["choices"][0].keys()
    assert first["logprobs"]["content"][0].keys() == expected["choices"][0]["logprobs"]["content"][0].keys()
    assert first["weight_versions"][0].keys() == expected["choices"][0]["weight_versions"][0].keys()
    assert found["prompt_token_ids"] is None
    body["return_token_ids"] = True
    assert server.client.post(PATH, json=body).json()["prompt_token_ids"] == body["token_ids"]
    without = server.client.post(PATH, json={"token_ids": [7], "sampling_params": {"max_tokens": 2}}).json()
    assert without["choices"][0]["logprobs"] is None
    assert without["usage"] == expected["usage"] | {
        "prompt_tokens": 1,
        "completion_tokens": len(without["choices"][0]["token_ids"]),
        "total_tokens": 1 + len(without["choices"][0]["token_ids"]),
    }


def test_requests_without_a_seed_draw_different_tokens(server: Server) -> None:
    found = {tuple(choice(ask(server, prompt(3), max_tokens=20))["token_ids"]) for _ in range(4)}
    assert len(found) == 4


def test_info_describes_the_model(server: Server) -> None:
    info = server.info()
    assert info["generates"] is True
    assert (info["vocabulary"], info["max_tokens"], info["dtype"]) == (400, 128, "float32")
    assert info["eos_token_ids"] == [2]
    assert server.client.get("/v1/models").json()["data"][0]["id"] == info["model"]
    assert server.client.get("/healthz").json() == {"status": "ready"}
    assert server.client.post("/v1/score", json={"token_ids": [[1]]}).status_code == 404


@pytest.mark.parametrize("options", [(), ("--generate",)])
@pytest.mark.parametrize(
    ("named", "expected"),
    [([9, 7], [2, 7, 9]), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((7, [2, 7]), (None, [2])))],
)
def test_both_servers_name_the_same_ends_of_sequence(
    folder: Path, tmp_path: Path, options: tuple[str, ...], named: Any, expected: list[int]
) -> None:
    """Those of the tokenizer and of the model's generation_config, as everything that writes completions has them."""
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    with Server(tmp_path / "model", *options) as server:
        assert server.info()["eos_token_ids"] == expected


# weights


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", False), ("qwen3_moe", None))),
    ],
)
def test_new_weights_write_the_completions_that_follow(tmp_path: Path, family: str, tied: bool | None) -> None:
    model = save_model(tmp_path / "student", family, tied=tied, seed=3)
    sampling = Sampling(max_new_tokens=12)
    with Server(model, "--generate") as server:
        before = choice(ask(server, prompt(5), seed=1, max_tokens=12))
        for version, factor in ((7, 0.8), (8, 1.1)):
            published = publish_scaled(model, tmp_path / "weights", version, factor)
            answer = load_weights(server, published, str(version))
            assert (answer.status_code, answer.json()) == (200, {"version": str(version)}), answer.text
            assert server.info()["version"] == str(version)
            found = choice(ask(server, prompt(5), seed=1, max_tokens=12))
            assert found["weight_versions"][0]["version"] == str(version)
            assert_same(found, own(published, prompt(5), 1, sampling))
            assert found["logprobs"] != before["logprobs"]
            before = found


@pytest.mark.slow
def test_a_completion_is_never_of_two_versions(tmp_path: Path) -> None:
    """Completions are asked for all the time while the weights change; each is that of the version that it names."""
    model = save_model(tmp_path / "student", "llama", seed=3)
    folders = {"default": model}
    for version in (1, 2):
        folders[str(version)] = publish_scaled(model, tmp_path / f"of {version}", version, 0.7**version)
    with Server(model, "--generate", hook=slow_generation, hook_arguments=(0.01,)) as server:
        ended = threading.Event()

        def keep_asking(worker: int) -> list[tuple[int, dict[str, Any]]]:
            found: list[tuple[int, dict[str, Any]]] = []
            while not ended.is_set() or len(found) < 2:
                seed = 100 * worker + len(found)
                found.append((seed, choice(ask(server, prompt(seed), seed=seed, max_tokens=12))))
            return found

        with ThreadPoolExecutor(4) as threads:
            workers = [threads.submit(keep_asking, worker) for worker in range(4)]
            for version in ("1", "2", "1"):
                time.sleep(0.5)
                assert load_weights(server, folders[version], version).status_code == 200
            time.sleep(0.5)
            ended.set()
            found = [each for worker in workers for each in worker.result()]
    versions = [each["weight_versions"][0]["version"] for _, each in found]
    assert {"default", "1", "2"} == set(versions)
    for seed, each in found:
        assert_same(each, own(folders[each["weight_versions"][0]["version"]], prompt(seed), seed, Sampling(12)))


def edited(published: Path, target: Path, kind: str) -> Path:
    """A copy of a published folder that must be refused."""
    shutil.copytree(published, target)
    manifest = json.loads((target / "manifest.json").read_text())
    weights = target / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.self_attn.q_proj.weight"
    if kind == "no manifest":
        (target / "manifest.json").unlink()
    elif kind == "edited":
        tensors[name] = tensors[name] + 1e-3
        save_file(tensors, weights, metadata={"format": "pt"})
    elif kind == "cut short":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif kind == "incomplete":
        (target / "manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    elif kind == "half a manifest":
        (target / "manifest.json").write_text(json.dumps(manifest)[:-20])
    else:
        if kind == "a tensor is missing":
            del tensors[name], manifest["tensors"][name]
        elif kind == "a tensor too many":
            tensors["model.more"] = torch.zeros(1)
            manifest["tensors"]["model.more"] = weights.name
        elif kind == "another shape":
            tensors[name] = tensors[name][:-1].contiguous()
        elif kind == "the manifest lacks a tensor":
            del manifest["tensors"][name]
        elif kind == "an adapter":
            manifest["kind"] = "adapter"
        save_file(tensors, weights, metadata={"format": "pt"})
        manifest["files"][weights.name] = hashlib.sha256(weights.read_bytes()).hexdigest()
        (target / "manifest.json").write_text(json.dumps(manifest))
    return target


REFUSED = {
    "no manifest": "no complete version",
    "edited": "is not what was published",
    "cut short": "is not what was published",
    "incomplete": "is damaged",
    "half a manifest": "is damaged",
    "a tensor is missing": "q_proj.weight' is absent there",
    "a tensor too many": "'model.more' is float32 of shape [1] there and absent in the server",
    "another shape": "is float32 of shape [63, 48] there and float32 of shape [64, 48] in the server",
    "the manifest lacks a tensor": "does not hold the tensors that its manifest names",
    "an adapter": "has an adapter: expected a whole model",
}


@pytest.fixture(scope="module")
def published(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_scaled(folder, tmp_path_factory.mktemp("weights"), 7, 0.5)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_folder_leaves_the_weights(
    server: Server, folder: Path, published: Path, tmp_path: Path, kind: str
) -> None:
    assert_refused(
        server, folder, load_weights(server, edited(published, tmp_path / "edited", kind), "7"), REFUSED[kind]
    )


def test_weights_of_another_dtype_or_place_are_refused(
    server: Server, folder: Path, published: Path, tmp_path: Path
) -> None:
    half = publish_scaled(folder, tmp_path / "half", 7, 0.5, torch.bfloat16)
    for target, version, message in [
        (half, "7", "bfloat16 of shape"),
        ("weights/version-00000007", "7", "expected an absolute path"),
        (tmp_path / "nowhere", "7", "no complete version"),
        (folder, "7", "no complete version"),
        (folder / "config.json", "7", "Not a directory"),
        ("/" + "a" * 4000, "7", "File name too long"),
        ("/a\0b", "7", "expected an absolute path"),
        (published, "two words", "version: String should match"),
        (published, "", "version: String should match"),
        (published, "a" * 129, "version: String should match"),
    ]:
        assert_refused(server, folder, load_weights(server, target, version), message)


def assert_refused(server: Server, folder: Path, answer: httpx2.Response, message: str) -> None:
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    found = choice(ask(server, prompt(2), seed=9, max_tokens=5))
    assert found["weight_versions"][0]["version"] == server.info()["version"] == "default"
    assert_same(found, own(folder, prompt(2), 9, Sampling(max_new_tokens=5)))


def test_the_client_of_runs_gets_completions_of_the_version_that_it_gave(folder: Path, tmp_path: Path) -> None:
    sampling = Sampling(max_new_tokens=5, temperature=0.8, stop=("e", " t"), eos_ids=tuple(range(2, 12)))
    asked = [GenerationRequest(at, np.array(prompt(at), dtype=np.int32), seed=at) for at in range(12)]
    with Server(folder, "--generate") as server:
        engine = ServedEngine([server.url], sampling, StillhouseApi(), vocabulary=400, timeout=60)
        for version, factor in ((0, 1.0), (1, 0.7)):
            published = publish_scaled(folder, tmp_path / "weights", version, factor)
            engine.update_weights(version, published)
            found = [future.result(timeout=60) for future in engine.generate(asked)]
            decoder, tokenizer = Decoder.from_pretrained(published), load_tokenizer(str(folder))
            generator = Generator(decoder, sampling, CPU, vocabulary=len(tokenizer), tokenizer=tokenizer)
            for given, expected in zip(found, generator.generate(asked, version), strict=True):
                assert given.ids_N.tolist() == expected.ids_N.tolist()
                np.testing.assert_allclose(given.log_probs_N, expected.log_probs_N, rtol=0, atol=1e-5)
                assert given.versions_N.tolist() == expected.versions_N.tolist()
                assert given.finish == expected.finish
            assert {each.finish for each in found} == {"stop", "length"}
        engine.close()


@pytest.mark.slow
def test_a_full_queue_answers_429_and_loses_no_completion(folder: Path) -> None:
    limits = ("--batch-tokens", 128, "--queue-tokens", 128)
    with Server(folder, "--generate", *limits, hook=slow_generation, hook_arguments=(0.03,)) as server:
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda seed: ask(server, prompt(1, 30), seed=seed, max_tokens=30), range(8)))
        assert {answer.status_code for answer in answers} == {200, 429}
        for seed, answer in enumerate(answers):
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            else:
                assert_same(choice(answer), own(folder, prompt(1, 30), seed, Sampling(max_new_tokens=30)))
        assert ask(server, prompt(1), max_tokens=3).status_code == 200


@pytest.mark.slow
def test_sigterm_loses_no_accepted_completion(folder: Path) -> None:
    with (
        Server(folder, "--generate", hook=slow_generation, hook_arguments=(0.1,)) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        answers = [threads.submit(ask, server, prompt(seed), seed=seed, max_tokens=20) for seed in range(3)]
        time.sleep(0.5)
        server.end()
        for seed, answer in enumerate(answers):
            assert_same(choice(answer.result()), own(folder, prompt(seed), seed, Sampling(max_new_tokens=20)))
        assert server.first.wait(60) == 0


def test_every_route_of_a_writing_server_but_healthz_needs_the_token(folder: Path) -> None:
    headers = {"authorization": "Bearer secret"}
    with Server(folder, "--generate", environment={"STILLHOUSE_TOKEN": "secret"}, headers=headers) as server:
        assert ask(server, [5], max_tokens=1).status_code == 200
        for path, method in ((PATH, "POST"), ("/v1/weights", "POST"), ("/v1/info", "GET"), ("/metrics", "GET")):
            assert httpx2.request(method, server.url + path, json={}).status_code == 401
        assert httpx2.get(server.url + "/healthz").status_code == 200


def test_a_writing_server_of_quantized_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="quantize=int8 with generate"):
        serve(str(folder), port=0, generate=True, quantize="int8")
