"""Hostile input against `stillhouse serve` in both roles: it answers 4xx, never with 500, and keeps serving."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit.hostile import assert_survives, from_the_openapi_document
from kit.runs import save_model
from kit.serving import Server
from safetensors.torch import save

from stillhouse.generation.weights import publish
from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.serving.wire import JSON, SAFETENSORS, encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

JSON_LIMIT = 8 * 2**20
GENERATE, WEIGHTS = "/inference/v1/generate", "/v1/weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "model", "qwen3", seed=2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        yield running
        assert running.client.post("/v1/score", json={"token_ids": [[1, 2]]}).status_code == 200


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[Server]:
    with Server(folder, "--generate") as running:
        yield running
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        assert running.client.post(GENERATE, json=body).status_code == 200


def scoring_bodies() -> list[tuple[str, str, bytes]]:
    """Path, content type and body of requests that are answered."""
    document = DocumentRows(
        np.arange(9, dtype=np.int32), range(2, 5), torch.tensor([[1, -1], [3, 3], [250, 0]]).int()
    )
    without = DocumentRows(document.tokens, document.rows)
    chosen = {"signal": "chosen", "top_k": 2, "temperature": 0.5, "token_ids": [[1, 2]], "ids": [[[1, 2], [3, -1]]]}
    top_k = {"signal": "top_k", "top_k": 3, "token_ids": [[1, 2], [3]], "rows": [[0, 2], [0, 1]]}
    prompt = {
        "prompt": [[5, 17, 250], [1, 2]],
        "max_tokens": 1,
        "prompt_logprobs": 2,
        "logprobs": 1,
        "temperature": 1.0,
    }
    return [
        ("/v1/score", SAFETENSORS, encode_request(SignalSpec("chosen", "float32", 2, 1.0), [document, document])),
        ("/v1/score", SAFETENSORS, encode_request(SignalSpec("hidden", "bfloat16"), [without])),
        ("/v1/score", JSON, json.dumps(chosen).encode()),
        ("/v1/score", JSON, json.dumps(top_k).encode()),
        ("/v1/completions", JSON, json.dumps(prompt).encode()),
        ("/v1/completions", JSON, json.dumps({"prompt": ["the quick", "fox"], "max_tokens": 0}).encode()),
    ]


def writing_bodies(weights: Path) -> list[tuple[str, str, bytes]]:
    every = {
        "n": 1,
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 17,
        "stop": ["ab", "c"],
        "stop_token_ids": [2, 9],
        "logprobs": 1,
    }
    bodies = [
        (GENERATE, {"token_ids": [5, 17, 250], "sampling_params": every, "return_token_ids": True}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}),
        (WEIGHTS, {"folder": str(weights), "version": "run-3"}),
    ]
    return [(path, JSON, json.dumps(body).encode()) for path, body in bodies]


@pytest.fixture(scope="module")
def weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(
        single_process_runner(Decoder.from_pretrained(folder), None), tmp_path_factory.mktemp("weights"), 3
    )


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_thousands_of_changed_bodies_are_answered_or_refused(server: Server, count: int) -> None:
    assert_survives(server, scoring_bodies(), count, seed=0)


@pytest.mark.parametrize("count", [80, pytest.param(3000, marks=pytest.mark.slow)])
def test_thousands_of_changed_bodies_are_answered_or_refused_by_a_writer(
    writer: Server, weights: Path, count: int
) -> None:
    assert_survives(writer, writing_bodies(weights), count, seed=0)


@pytest.mark.parametrize("role", ["server", "writer"])
@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.slow)])
def test_requests_made_from_the_openapi_document_are_no_server_errors(
    request: pytest.FixtureRequest, role: str, count: int
) -> None:
    from_the_openapi_document(request.getfixturevalue(role), count)


def score(server: Server, body: dict[str, Any]) -> httpx2.Response:
    return server.client.post("/v1/score", json=body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": [[400]]}, "sequence 0 has the token id 400: expected 0 to 399"),
        ({"token_ids": [[1], [2**31 - 1]]}, "sequence 1 has the token id 2147483647"),
        ({"token_ids": [[-1]]}, "each from 0 to"),
        ({"token_ids": [[2**70]]}, "token_ids"),
        ({"token_ids": [[]]}, "expected one token or more per document"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [[1] * 129]}, "sequence 0 has 129 tokens: expected 1 to 128"),
        ({"token_ids": [[1] * 128] * 513}, "65664 tokens: expected at most 65536 per request"),
        ({"token_ids": [[1]] * 4097}, "4097 sequences: expected at most 4096"),
        ({"token_ids": [[1]], "rows": [[0, 2]]}, "rows 0 to 2 of a document of 1 tokens"),
        ({"token_ids": [[1]], "signal": "top_k", "top_k": 257}, "top_k=257: expected at most 256"),
        ({"token_ids": [[1]], "signal": "sampled", "top_k": 256}, "top_k=256 draws per token: expected at most 255"),
        ({"token_ids": [[1]], "signal": "chosen", "top_k": 1, "ids": [[[400]]]}, "ids: got 400"),
        ({"token_ids": [[1]], "signal": "chosen", "top_k": 1, "ids": [[[-2]]]}, "ids: got -2"),
        ({"token_ids": [[1]], "signal": "chosen", "top_k": 2, "ids": [[[1]]]}, "ids of shape [1, 1]"),
        ({"token_ids": [[1]], "more": 1}, "more: Extra inputs are not permitted"),
        ({"token_ids": [[True]]}, "token_ids"),
    ],
)
def test_a_request_beyond_the_limits_is_refused_by_name(server: Server, body: dict[str, Any], message: str) -> None:
    answer = score(server, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_an_oversized_body_is_refused_before_it_is_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(f"content-length: {10**15}\r\n\r\n{{".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_an_oversized_body_in_chunks_is_refused_at_the_limit(server: Server) -> None:
    """It has no Content-Length."""
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.sendall(b"transfer-encoding: chunked\r\n\r\n")
        client.setblocking(False)
        chunk, answer = b"10000\r\n" + b" " * 0x10000 + b"\r\n", b""
        try:
            while sent < 4 * JSON_LIMIT and not answer:
                client.settimeout(5)
                client.sendall(chunk)
                sent += len(chunk)
                client.setblocking(False)
                try:
                    answer = client.recv(100)
                except BlockingIOError:
                    continue
        except OSError:
            answer = b"closed"
    assert answer.startswith((b"HTTP/1.1 413 ", b"closed"))
    assert JSON_LIMIT // 2 < sent < 4 * JSON_LIMIT
    assert server.client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"token_ids":' + b"[" * 100_000,
        b"\xff\xfe",
        b"null",
        b"0",
        b'{"token_ids":[[1e5]]}',
    ],
)
def test_malformed_json_is_refused(server: Server, content: bytes) -> None:
    for path in ("/v1/score", "/v1/completions"):
        answer = server.client.post(path, content=content, headers={"content-type": JSON})
        assert answer.status_code == 400, (path, answer.text)


def test_malformed_safetensors_are_refused(server: Server) -> None:
    tokens = {"token_ids": torch.zeros(2, dtype=torch.int32), "offsets": torch.tensor([0, 2])}
    rows = torch.tensor([[0, 2]], dtype=torch.int32)
    hidden = {"score": json.dumps({"signal": "hidden"})}
    bodies = [
        b"",
        b"\xff" * 8,
        (10**18).to_bytes(8, "little") + b"{}",
        save(tokens | {"rows": rows}),
        save(tokens | {"rows": rows}, {"score": "[" * 100_000}),
        save(tokens | {"rows": rows}, {"score": "{}"})[:-1],
        save(tokens | {"rows": rows.float()}, hidden),
        save(tokens | {"rows": rows, "more": rows.clone()}, hidden),
        save(tokens | {"rows": rows[0]}, hidden),
        save(tokens | {"rows": rows, "offsets": torch.tensor([0, 2**62, 2])}, hidden),
        save(tokens | {"rows": rows, "offsets": torch.tensor(-(2**63))}, hidden),
        save(tokens | {"rows": rows, "token_ids": torch.zeros(2, 1, dtype=torch.int32)}, hidden),
        save(tokens | {"rows": rows}, {"score": json.dumps({"signal": "top_k", "top_k": 10**30})}),
        save(tokens | {"rows": rows}, {"score": '{"signal":"top_k","top_k":1,"temperature":NaN}'}),
    ]
    for body in bodies:
        answer = server.client.post("/v1/score", content=body, headers={"content-type": SAFETENSORS})
        assert answer.status_code == 400, (body[:100], answer.text)


@pytest.mark.parametrize("kind", ["text/plain", "", "application/octet-stream", "application/jsonx"])
def test_another_content_type_is_refused(server: Server, kind: str) -> None:
    for path in ("/v1/score", "/v1/completions"):
        answer = server.client.post(path, content=b'{"token_ids":[[1]]}', headers={"content-type": kind})
        assert answer.status_code == 415


@pytest.mark.parametrize(
    "name",
    ["../config.json", "..%2fconfig.json", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/etc/passwd", "config.json%00",
     "config.json/", ".", "..",
     "model.safetensors", "CONFIG.JSON", "....//config.json", "config.json%20", "%ff", "a" * 5000],
)  # fmt: skip
def test_files_that_are_not_in_the_table_do_not_exist(server: Server, name: str) -> None:
    """Sent as it is: a client would tidy the path."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET /v1/files/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        status = int(client.recv(4096).split()[1])
    assert status == 404


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/score HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/info HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /v1/head HTTP/1.1\r\nhost: x\r\nrange: bytes=9-1,-,x\r\nconnection: close\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(server: Server, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        try:
            client.sendall(raw)
            answer = client.recv(100)
        except ConnectionError:
            answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer
    assert server.client.get("/healthz").status_code == 200


def test_other_methods_are_refused(server: Server) -> None:
    for path in ("/v1/score", "/v1/info", "/healthz"):
        for method in ("PUT", "DELETE", "TRACE", "PATCH", "BREW"):
            assert server.client.request(method, path).status_code == 405


# the role that writes completions


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"token_ids": []}, "token_ids: List should have at least 1 item"),
        ({"token_ids": [400]}, "sequence 0 has the token id 400: expected 0 to 399"),
        ({"token_ids": [-1]}, "token_ids.0: Input should be greater than or equal to 0"),
        ({"token_ids": [2**70]}, "token_ids.0"),
        ({"token_ids": [[1]]}, "token_ids.0: Input should be a valid integer"),
        ({"token_ids": [True]}, "token_ids.0"),
        ({"token_ids": [1] * 128}, "128 tokens of the prompt and max_tokens=16: expected at most 128 together"),
        ({"token_ids": [1] * 129}, "129 tokens: expected at most 128 per request"),
        ({"more": 1}, "more: is not supported by this server"),
        ({"stream": True}, "stream: Input should be False"),
        ({"sampling_params": None}, "sampling_params: Input should be an object"),
    ],
)
def test_a_completion_beyond_the_limits_is_refused_by_name(
    writer: Server, body: dict[str, Any], message: str
) -> None:
    assert_refused(writer, {"token_ids": [1], "sampling_params": {}} | body, message)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 2}, "sampling_params.n"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"max_tokens": 10**30}, "expected at most 128 together"),
        ({"max_tokens": 128}, "expected at most 128 together"),
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"temperature": 0.001}, "temperature=0.001: expected 0, or at least 0.01"),
        ({"temperature": 5e-324}, "expected 0, or at least 0.01"),
        ({"temperature": 101}, "sampling_params.temperature"),
        ({"top_p": 0}, "sampling_params.top_p"),
        ({"top_p": 1.1}, "sampling_params.top_p"),
        ({"top_k": -2}, "sampling_params.top_k"),
        ({"min_p": -0.1}, "sampling_params.min_p"),
        ({"seed": -1}, "sampling_params.seed"),
        ({"seed": 2**63}, "sampling_params.seed"),
        ({"stop": ""}, "sampling_params.stop"),
        ({"stop": ["a"] * 17}, "17 stop texts: expected at most 16"),
        ({"stop": "a" * 257}, "sampling_params.stop"),
        ({"stop_token_ids": [-1]}, "sampling_params.stop_token_ids"),
        ({"stop_token_ids": [2] * 257}, "sampling_params.stop_token_ids"),
        ({"logprobs": 2}, "sampling_params.logprobs"),
        ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
        ({"repetition_penalty": 1.1}, "sampling_params.repetition_penalty"),
        ({"bad_words": ["a"]}, "sampling_params.bad_words: is not supported by this server"),
    ],
)
def test_sampling_that_is_not_supported_is_refused_by_name(
    writer: Server, sampling: dict[str, Any], message: str
) -> None:
    assert_refused(writer, {"token_ids": [1], "sampling_params": sampling}, message)


def assert_refused(writer: Server, body: dict[str, Any], message: str) -> None:
    answer = writer.client.post(GENERATE, json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_extreme_sampling_that_is_allowed_is_answered(writer: Server) -> None:
    for sampling in (
        {"temperature": 0.01},
        {"temperature": 100},
        {"top_p": 5e-324},
        {"top_k": 2**31 - 1},
        {"top_k": 1},
        {"min_p": 1},
        {"seed": 2**63 - 1},
        {"stop": ["\N{SNOWMAN}" * 256]},
        {"stop_token_ids": list(range(256)), "ignore_eos": True},
    ):
        body = {"token_ids": [1, 399, 0], "sampling_params": {"max_tokens": 4, "logprobs": 0} | sampling}
        answer = writer.client.post(GENERATE, json=body)
        assert answer.status_code == 200, (sampling, answer.text)
        values = [each["logprob"] for each in answer.json()["choices"][0]["logprobs"]["content"]]
        assert all(-1000 < value <= 0 for value in values)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"token_ids":' + b"[" * 100_000,
        b"\xff\xfe",
        b"null",
        b'{"token_ids":[1],"sampling_params":{"stop":"\\ud800"}}',
        b'{"token_ids":[1],"sampling_params":{"temperature":NaN}}',
        b'{"token_ids":[1],"sampling_params":{"temperature":1e999}}',
        b'{"folder":"\\ud800","version":"1"}',
    ],
    ids=lambda content: repr(content[:40]),
)
def test_malformed_json_is_refused_by_a_writer(writer: Server, content: bytes) -> None:
    for path in (GENERATE, WEIGHTS):
        answer = writer.client.post(path, content=content, headers={"content-type": JSON})
        # a body of new weights names a folder, so its limit is lower
        too_large = path == WEIGHTS and len(content) > 16 * 1024
        assert answer.status_code == (413 if too_large else 400), (path, answer.text)


def test_other_content_types_and_large_bodies_are_refused(writer: Server) -> None:
    for path in (GENERATE, WEIGHTS):
        assert writer.client.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        large = b" " * (9 * 2**20)
        assert writer.client.post(path, content=large, headers={"content-type": JSON}).status_code == 413
