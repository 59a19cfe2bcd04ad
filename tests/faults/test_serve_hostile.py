"""Hostile input against `stillhouse serve` in both roles: it answers 4xx, never with 500, and keeps serving."""

import json
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from kit import slow
from kit.config_cases import MESSAGES
from kit.mutations import assert_survives, from_the_openapi_document
from kit.serving import Server, load_weights
from safetensors.torch import save

from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.rollout.publish import publish
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.wire import encode_request
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

JSON_LIMIT = 8 * 2**20
SCORE, COMPLETE, GENERATE, WEIGHTS = "/v1/score", "/v1/completions", "/inference/v1/generate", "/v1/weights"
PATHS = (SCORE, COMPLETE, GENERATE, WEIGHTS)
SMALLEST: dict[str, dict[str, Any]] = {
    SCORE: {"token_ids": [[1, 2]]},
    COMPLETE: {"prompt": [1, 2, 3], "max_tokens": 1},
    GENERATE: {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder) as running:
        yield running
        assert running.client.post(SCORE, json=SMALLEST[SCORE]).status_code == 200


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[Server]:
    with Server(folder, "--generate") as running:
        yield running
        assert running.client.post(GENERATE, json=SMALLEST[GENERATE]).status_code == 200


@pytest.fixture(scope="module")
def by_path(server: Server, writer: Server) -> dict[str, httpx2.Client]:
    return dict(zip(PATHS, [server.client] * 2 + [writer.client] * 2, strict=True))


def scoring_bodies() -> list[tuple[str, str, bytes]]:
    """Path, content type and body of requests that are answered."""
    document = DocumentRows(np.arange(9, dtype=np.int32), range(2, 5), torch.tensor([[1, -1], [3, 3], [99, 0]]).int())
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
    sampling = {
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
        (GENERATE, {"token_ids": [5, 17, 250], "sampling_params": sampling, "return_token_ids": True}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}),
        (WEIGHTS, {"folder": str(weights), "version": "run-3"}),
    ]
    return [(path, JSON, json.dumps(body).encode()) for path, body in bodies]


@pytest.mark.parametrize(
    ("role", "count"), [("server", 200), ("writer", 100), slow("server", 1000), slow("writer", 500)]
)
def test_thousands_of_changed_bodies_are_answered_or_refused(
    request: pytest.FixtureRequest, folder: Path, tmp_path: Path, role: str, count: int
) -> None:
    running = request.getfixturevalue(role)
    if role == "server":
        bodies = scoring_bodies()
    else:
        bodies = writing_bodies(publish(single_process_runner(Decoder.from_pretrained(folder), None), tmp_path, 3))
    assert_survives(running, bodies, count, seed=0)


@pytest.mark.parametrize("role", ["server", "writer"])
@pytest.mark.parametrize("count", [15, slow(150)])
def test_requests_made_from_the_openapi_document_are_no_server_errors(
    request: pytest.FixtureRequest, role: str, count: int
) -> None:
    from_the_openapi_document(request.getfixturevalue(role), count)


#: changes of the smallest body of a route, and the message; of sampling, the field alone if it is enough
BEYOND = [(*eval(case["call"]), case["error"]) for case in MESSAGES["requests to a server"]]


def test_a_request_beyond_the_limits_is_refused_by_name(by_path: dict[str, httpx2.Client]) -> None:
    """In the form of vLLM's errors."""
    recorded = json.loads((Path(__file__).parents[1] / "kit" / "engines" / "compl_cap.json").read_text())
    for path, change, message in BEYOND:
        answer = by_path[path].post(path, json=SMALLEST[path] | change)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == (404 if "model" in change else 400), (change, answer.text)
        assert message in error["message"], (change, answer.text)
        assert list(error) == list(recorded["response"]["error"])


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
        log_probs = [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]
        assert all(-1000 < log_prob <= 0 for log_prob in log_probs)


def test_an_oversized_body_in_chunks_is_refused_at_the_limit(server: Server) -> None:
    """It has no Content-Length."""
    head = f"POST {SCORE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ntransfer-encoding: chunked\r\n\r\n"
    sent, answer = 0, b""
    with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(ConnectionError):
        client.settimeout(30)
        client.sendall(head.encode())
        while sent < 4 * JSON_LIMIT and not answer:
            client.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            sent += 0x10000
            answer = client.recv(100) if select.select([client], [], [], 0)[0] else b""
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert JSON_LIMIT // 2 < sent < 4 * JSON_LIMIT
    assert server.client.get("/healthz").status_code == 200


def test_a_client_is_not_told_which_paths_exist(writer: Server, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "not readable").mkdir(mode=0)
    (tmp_path / "of others").mkdir()
    (tmp_path / "of others" / "manifest.json").write_text('{"name": "a web page"}')
    places = [folder, folder / "config.json", tmp_path / "nowhere", tmp_path / "not readable", Path("/root")]
    places.append(tmp_path / "of others")
    answers = [load_weights(writer, place, "7").json()["error"]["message"] for place in places]
    assert {answer.replace(str(place), "…") for answer, place in zip(answers, places, strict=True)} == {
        "… is no complete version of the weights that this server can read: expected the folder that the run writes "
        "to, on a file system that the run and the server share; see the server's log"
    }


MALFORMED = [
    b"", b"{", b"[" * 100_000, b'{"token_ids":' + b"[" * 100_000, b"\xff\xfe", b"null", b"0",
    b'{"token_ids":[[1e5]]}', b'{"token_ids":[1],"sampling_params":{"stop":"\\ud800"}}',
    b'{"token_ids":[1],"sampling_params":{"temperature":NaN}}',
    b'{"token_ids":[1],"sampling_params":{"temperature":1e999}}', b'{"folder":"\\ud800","version":"1"}',
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_malformed_json_is_refused(by_path: dict[str, httpx2.Client], path: str) -> None:
    for content in MALFORMED:
        answer = by_path[path].post(path, content=content, headers={"content-type": JSON})
        # a body of new weights names a folder, so its limit is lower
        too_large = path == WEIGHTS and len(content) > 16 * 1024
        assert answer.status_code == (413 if too_large else 400), (content[:40], answer.text)


def test_malformed_safetensors_are_refused(server: Server) -> None:
    tokens = {"token_ids": torch.zeros(2, dtype=torch.int32), "offsets": torch.tensor([0, 2])}
    rows = torch.tensor([[0, 2]], dtype=torch.int32)
    hidden = {"score": json.dumps({"signal": "hidden"})}
    bodies = [
        b"", b"\xff" * 8, (10**18).to_bytes(8, "little") + b"{}", save(tokens | {"rows": rows}),
        save(tokens | {"rows": rows}, {"score": "[" * 100_000}),
        save(tokens | {"rows": rows}, {"score": "{}"})[:-1], save(tokens | {"rows": rows.float()}, hidden),
        save(tokens | {"rows": rows, "more": rows.clone()}, hidden), save(tokens | {"rows": rows[0]}, hidden),
        save(tokens | {"rows": rows, "offsets": torch.tensor([0, 2**62, 2])}, hidden),
        save(tokens | {"rows": rows, "offsets": torch.tensor(-(2**63))}, hidden),
        save(tokens | {"rows": rows, "token_ids": torch.zeros(2, 1, dtype=torch.int32)}, hidden),
        save(tokens | {"rows": rows}, {"score": json.dumps({"signal": "top_k", "top_k": 10**30})}),
        save(tokens | {"rows": rows}, {"score": '{"signal":"top_k","top_k":1,"temperature":NaN}'}),
    ]  # fmt: skip
    for body in bodies:
        answer = server.client.post("/v1/score", content=body, headers={"content-type": SAFETENSORS})
        assert answer.status_code == 400, (body[:100], answer.text)


@pytest.mark.parametrize("path", PATHS)
def test_other_content_types_and_large_bodies_are_refused(by_path: dict[str, httpx2.Client], path: str) -> None:
    for kind in ("text/plain", "", "application/octet-stream", "application/jsonx"):
        answer = by_path[path].post(path, content=b'{"token_ids":[[1]]}', headers={"content-type": kind})
        assert answer.status_code == 415
    large = b" " * (9 * 2**20)
    assert by_path[path].post(path, content=large, headers={"content-type": JSON}).status_code == 413


@pytest.mark.parametrize(
    "name",
    ["../config.json", "..%2fconfig.json", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/etc/passwd", "config.json%00",
     "config.json/", ".", "..",
     "model.safetensors", "CONFIG.JSON", "....//config.json", "config.json%20", "%ff", "a" * 5000],
)  # fmt: skip
def test_files_that_are_not_in_the_table_do_not_exist(server: Server, name: str) -> None:
    """Sent as it is: a client would tidy the path."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET /v1/files/{name} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        status = int(client.recv(4096).split()[1])
    assert status == 404


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /v1/head HTTP/1.1\r\nhost: localhost\r\nrange: bytes=9-1,-,x\r\nconnection: close\r\n\r\n",
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
