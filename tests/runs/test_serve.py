"""`stillhouse serve` as a real process on loopback: its signals are the teacher's own, and it loses no request."""

import hashlib
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit import slow
from kit.runs import run, save_model, wait_for
from kit.serving import SCORING, Server, nan_for_token, out_of_memory_above, slow_down
from safetensors.torch import load

from stillhouse.models import Decoder, model_fingerprint
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

HIDDEN = SignalSpec("hidden", "float32")
TOP_K = SignalSpec("top_k", "float32", 7, 2.0)
CHOSEN = SignalSpec("chosen", "float32", 5, 0.5)
ENGINES = Path(__file__).parents[1] / "kit" / "engines"


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with Server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder).double()


def random_documents(count: int, seed: int = 0, most: int = 37, kind: SignalSpec = HIDDEN) -> list[DocumentRows]:
    """Random documents of 1 to `most` tokens, of each of which some rows are asked for."""
    random = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        tokens = random.integers(0, 400, size=random.integers(1, most + 1)).astype(np.int32)
        start = int(random.integers(0, len(tokens)))
        rows = range(start, int(random.integers(start + 1, len(tokens) + 1)))
        ids = None
        if kind.kind == "chosen":
            ids = torch.from_numpy(random.integers(-1, 400, size=(len(rows), kind.top_k))).int()
            ids[:, 3] = ids[:, 1]
        documents.append(DocumentRows(tokens, rows, ids))
    return documents


def teacher_hidden(decoder: Decoder, document: DocumentRows) -> torch.Tensor:
    """The teacher's own hidden states of a document alone, in float64."""
    input_ids = torch.from_numpy(document.tokens).long()[None]
    with torch.no_grad():
        hidden_SE = decoder(input_ids, head=False)[0]
    return hidden_SE[document.rows.start : document.rows.stop]


def teacher_log_probs(decoder: Decoder, document: DocumentRows, temperature: float) -> torch.Tensor:
    head = decoder.output_head()
    return (head.logits(teacher_hidden(decoder, document)) / temperature).detach().log_softmax(1)


def assert_same(server: Server, decoder: Decoder, kind: SignalSpec, documents: list[DocumentRows]) -> None:
    """The server gives the teacher's own signals of each document."""
    for document, tensors in zip(documents, server.score(kind, documents), strict=True):
        assert len(next(iter(tensors.values()))) == len(document.rows)
        if kind.kind == "hidden":
            exact_NE = teacher_hidden(decoder, document)
            torch.testing.assert_close(tensors["hidden"].double(), exact_NE, rtol=1e-5, atol=1e-5)
            continue
        assert kind.temperature is not None
        log_p_NV = teacher_log_probs(decoder, document, kind.temperature)
        if kind.kind == "top_k":
            assert kind.top_k is not None
            ids_NK = log_p_NV.topk(kind.top_k)[1]
            assert torch.equal(tensors["ids"].long(), ids_NK)
            expected_NK = log_p_NV.gather(1, ids_NK)
            outside_NV = log_p_NV.scatter(1, ids_NK, -torch.inf)
        else:
            assert document.ids_NK is not None
            expected_NK, outside_NV = torch.full(document.ids_NK.shape, -torch.inf).double(), log_p_NV.clone()
            for row, ids in enumerate(document.ids_NK.tolist()):
                for at, token in enumerate(ids):
                    if token >= 0 and token not in ids[:at]:
                        expected_NK[row, at] = log_p_NV[row, token]
                        outside_NV[row, token] = -torch.inf
        torch.testing.assert_close(tensors["log_probs"].double(), expected_NK, rtol=1e-5, atol=5e-5)
        torch.testing.assert_close(tensors["tail_log_prob"].double(), outside_NV.logsumexp(1), rtol=1e-5, atol=5e-5)


def test_requests_of_many_clients_for_different_signals_share_batches(server: Server, decoder: Decoder) -> None:
    def one(number: int) -> None:
        kind = (HIDDEN, TOP_K, CHOSEN)[number % 3]
        assert_same(server, decoder, kind, random_documents(1 + number % 4, seed=number, kind=kind))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(48)))


@pytest.mark.parametrize("deterministic", [True, slow(False)])
def test_an_answer_depends_on_other_requests_unless_the_server_is_deterministic(
    folder: Path, deterministic: bool
) -> None:
    """In bfloat16, the rounding of a product depends on its rows. Slow batches let the requests wait together."""
    options = ["--dtype", "bfloat16", *["--deterministic"] * deterministic]
    requests = [random_documents(3, seed) for seed in range(6)]
    with Server(folder, *options, hook=slow_down, hook_arguments=(SCORING, 0.05)) as server:
        alone = [server.score(HIDDEN, documents) for documents in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            together = list(pool.map(lambda documents: server.score(HIDDEN, documents), requests))
    pairs = zip(chain.from_iterable(alone), chain.from_iterable(together), strict=True)
    assert all(torch.equal(one["hidden"], other["hidden"]) for one, other in pairs) == deterministic


def test_json_asks_for_the_same(server: Server) -> None:
    documents = random_documents(3, kind=CHOSEN)
    body = {
        "signal": "chosen",
        "dtype": "float32",
        "top_k": 5,
        "temperature": 0.5,
        "token_ids": [document.tokens.tolist() for document in documents],
        "rows": [[document.rows.start, document.rows.stop] for document in documents],
        "ids": [document.ids_NK.tolist() for document in documents if document.ids_NK is not None],
    }
    answer = server.client.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    binary = torch.cat([tensors["log_probs"] for tensors in server.score(CHOSEN, documents)])
    torch.testing.assert_close(load(answer.content)["log_probs"], binary, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [slow(False), True], ids=["untied", "tied"])
def test_two_ranks_serve_what_one_process_serves(tmp_path: Path, tied: bool) -> None:
    folder = save_model(tmp_path / "teacher", "llama", tied=tied, seed=3)
    decoder = Decoder.from_pretrained(folder).double()
    with Server(folder, processes=2) as server:
        info = server.info()
        assert info["vocabulary"] == 400
        for kind in (HIDDEN, TOP_K, CHOSEN):
            assert_same(server, decoder, kind, random_documents(6, kind=kind))
        answer = server.client.post(
            "/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 0, "prompt_logprobs": 2}
        )
        assert answer.status_code == 200, answer.text
        (head,) = load(server.client.get("/v1/head").content).values()
        assert torch.equal(head, decoder.output_weight.float())


def test_info_head_and_files_describe_the_teacher(server: Server, folder: Path, decoder: Decoder) -> None:
    info = server.info()
    assert info["teacher"] == model_fingerprint(folder)
    assert (info["vocabulary"], info["width"], info["dtype"]) == (400, 48, "float32")
    assert info["eos_token_ids"] == [2]
    head = server.client.get("/v1/head")
    (weight,) = load(head.content).values()
    assert torch.equal(weight, decoder.output_weight.float())
    assert hashlib.sha256(head.content).hexdigest() == info["files"]["model.safetensors"]
    for name, digest in info["files"].items():
        if name != "model.safetensors":
            content = server.client.get(f"/v1/files/{name}").content
            assert hashlib.sha256(content).hexdigest() == digest
    assert "config.json" in info["files"]
    assert "tokenizer.json" in info["files"]


@pytest.mark.parametrize("name", ["compl_prompt_logprobs", "compl_two_prompts"])
def test_completions_have_the_form_of_vllm(server: Server, decoder: Decoder, name: str) -> None:
    recorded = json.loads((ENGINES / f"{name}.json").read_text())
    request = recorded["request"]["json"]
    del request["model"]
    prompts = request["prompt"] if isinstance(request["prompt"][0], list) else [request["prompt"]]
    prompts = [[token % 400 for token in prompt] for prompt in prompts]
    answer = server.client.post("/v1/completions", json={**request, "prompt": prompts})
    assert answer.status_code == 200, answer.text
    assert keys(answer.json(), prompts) == keys(recorded["response"], prompts)
    for choice, prompt in zip(answer.json()["choices"], prompts, strict=True):
        assert choice["prompt_token_ids"] == prompt
        document = DocumentRows(np.array(prompt, dtype=np.int32), range(len(prompt)))
        log_p_NV = teacher_log_probs(decoder, document, 1.0)
        assert choice["token_ids"] == [int(log_p_NV[-1].argmax())]
        assert choice["prompt_logprobs"][0] is None
        for log_p_V, token, entries in zip(log_p_NV, prompt[1:], choice["prompt_logprobs"][1:], strict=False):
            for key, entry in entries.items():
                assert entry["logprob"] == pytest.approx(float(log_p_V[int(key)]), abs=5e-5)
                assert entry["rank"] == int((log_p_V >= log_p_V[int(key)]).sum())
            top = log_p_V.topk(request["prompt_logprobs"])[1].tolist()
            assert list(entries) == [str(number) for number in dict.fromkeys([token, *top])]


def keys(answer: dict[str, Any], prompts: list[list[int]]) -> Any:
    """The structure of an answer without its values. An entry of a token has K or K + 1 ids."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    logprobs = choices[0]["logprobs"]
    return (
        list(answer),
        list(answer["usage"]),
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
        [list(choice) for choice in choices],
        [len(choice["prompt_logprobs"]) for choice in choices],
        {tuple(entry) for choice in choices for row in choice["prompt_logprobs"][1:] for entry in row.values()},
        None if logprobs is None else [(key, len(value)) for key, value in logprobs.items()],
        None if logprobs is None else len(logprobs["top_logprobs"][0]),
    )


def test_a_text_prompt_is_tokenized_as_by_the_tokenizer(server: Server, folder: Path) -> None:
    from stillhouse.data import load_tokenizer

    text = "the quick brown fox"
    body = {"prompt": [text, text + text], "max_tokens": 0, "prompt_logprobs": 1, "return_token_ids": True}
    choices = server.client.post("/v1/completions", json=body).json()["choices"]
    assert choices[0]["prompt_token_ids"] == load_tokenizer(str(folder))(text)["input_ids"]
    assert (choices[0]["token_ids"], choices[0]["text"]) == ([], "")


def test_a_full_queue_answers_429_with_retry_after_and_loses_nothing(folder: Path) -> None:
    options = ("--batch-tokens", 40, "--queue-tokens", 100)
    with Server(folder, *options, hook=slow_down, hook_arguments=(SCORING, 0.2)) as server:
        tokens = [[5] * 37]

        def one(_: int) -> httpx2.Response:
            return server.client.post("/v1/score", json={"token_ids": tokens})

        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(one, range(12)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        refused = answers[statuses.index(429)]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "TooManyRequestsError"
        wait_for(lambda: "stillhouse_held_tokens 0.0" in server.client.get("/metrics").text)
        assert one(0).status_code == 200


def test_a_client_that_leaves_frees_its_place(folder: Path) -> None:
    """Its documents are dropped from the queue, and the others are answered."""
    options = ("--batch-tokens", 40, "--queue-tokens", 8000)
    with Server(folder, *options, hook=slow_down, hook_arguments=(SCORING, 0.3)) as server:
        body = json.dumps({"token_ids": [[5] * 37] * 30}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            head = "POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            leaving.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            wait_for(lambda: "stillhouse_held_tokens 1110.0" in server.client.get("/metrics").text)
        started = time.monotonic()
        assert server.client.post("/v1/score", json={"token_ids": [[7] * 3]}).status_code == 200
        assert time.monotonic() - started < 3  # 30 forward passes would take 9 seconds
        wait_for(lambda: "stillhouse_held_tokens 0.0" in server.client.get("/metrics").text)


def test_too_little_memory_fails_its_own_batch_alone(folder: Path) -> None:
    with Server(folder, hook=out_of_memory_above, hook_arguments=(50,)) as server:
        failed = server.client.post("/v1/score", json={"token_ids": [[5] * 37] * 2})
        assert failed.status_code == 500
        assert "too little memory for a batch" in failed.json()["error"]["message"]
        assert server.client.post("/v1/score", json={"token_ids": [[5] * 37]}).status_code == 200
        assert "stillhouse_failed_batches_total 1.0" in server.client.get("/metrics").text


def test_a_teacher_that_overflows_is_never_sent(folder: Path, decoder: Decoder) -> None:
    with Server(folder, hook=nan_for_token, hook_arguments=(7,)) as server:
        for signal_body in ({"signal": "hidden"}, {"signal": "top_k", "top_k": 2}):
            bad = server.client.post("/v1/score", json={"token_ids": [[5, 7, 9]], **signal_body})
            assert bad.status_code == 422
            assert "are not finite" in bad.json()["error"]["message"]
            assert server.client.post("/v1/score", json={"token_ids": [[5, 8, 9]], **signal_body}).status_code == 200
        bad = server.client.post("/v1/completions", json={"prompt": [5, 7, 9], "max_tokens": 0, "prompt_logprobs": 1})
        assert bad.status_code == 422


@pytest.mark.parametrize("options", [(), ("--generate",)], ids=["score", "generate"])
def test_every_route_but_healthz_needs_the_token(folder: Path, options: tuple[str, ...]) -> None:
    environment, headers = {"STILLHOUSE_TOKEN": "s3cret"}, {"authorization": "Bearer s3cret"}
    with (
        Server(folder, *options, environment=environment, headers=headers) as server,
        httpx2.Client(base_url=server.url) as stranger,
    ):
        paths = [path.replace("{name}", "config.json") for path in server.client.get("/openapi.json").json()["paths"]]
        for wrong in (None, "Bearer wrong", "s3cret", "Bearer", "bearer s3cret"):
            sent = {} if wrong is None else {"authorization": wrong}
            for path in {*paths, "/openapi.json", "/none"} - {"/healthz"}:
                for method in ("GET", "POST"):
                    answer = stranger.request(method, path, headers=sent)
                    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        of_proxy = {"host": "teacher.example:8000", "origin": "https://teacher.example"}
        assert server.client.get("/v1/info", headers=of_proxy).status_code == 200
        large = stranger.post(paths[-1], content=b" " * (20 * 2**20))
        assert large.status_code == 401  # and no reset connection
        assert stranger.get("/healthz").status_code == 200
        assert server.client.get("/v1/info").status_code == 200
        assert "s3cret" not in server.first.out


def test_a_port_in_use_is_refused_before_the_model_is_loaded(server: Server, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    error = run("serve", tmp_path / "none", "--port", server.port, code=1).err
    assert f"port {server.port} cannot be used" in error


def test_a_second_signal_ends_the_server_at_once(folder: Path) -> None:
    server = Server(folder, hook=slow_down, hook_arguments=(SCORING, 20.0))
    server.__enter__()
    threading.Thread(target=lambda: _ignored(server), daemon=True).start()
    wait_for(lambda: "stillhouse_held_tokens 1.0" in server.client.get("/metrics").text)
    server.first.send(signal.SIGTERM)
    wait_for(lambda: "finishing the requests" in server.first.err)
    server.first.send(signal.SIGTERM)
    assert server.first.wait(10) == 143


def _ignored(server: Server) -> None:
    try:
        server.client.post("/v1/score", json={"token_ids": [[1]]})
    except httpx2.HTTPError:
        return
