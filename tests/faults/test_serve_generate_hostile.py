"""Hostile input against `stillhouse serve --generate`: it answers 4xx, never with 500, and keeps serving."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.hostile import assert_survives, from_the_openapi_document
from kit.runs import save_model
from kit.serving import Server

from stillhouse.generation.weights import publish
from stillhouse.models import Decoder
from stillhouse.parallel import single_process_runner
from stillhouse.serving.wire import JSON

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("serve") / "student", "llama", seed=2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with Server(folder, "--generate") as running:
        yield running
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}}
        assert running.client.post(PATH, json=body).status_code == 200


def valid_bodies(weights: Path) -> list[tuple[str, str, bytes]]:
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
        (PATH, {"token_ids": [5, 17, 250], "sampling_params": every, "return_token_ids": True}),
        (PATH, {"token_ids": [5], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}),
        ("/v1/weights", {"folder": str(weights), "version": "run-3"}),
    ]
    return [(path, JSON, json.dumps(body).encode()) for path, body in bodies]


@pytest.fixture(scope="module")
def weights(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(
        single_process_runner(Decoder.from_pretrained(folder), None), tmp_path_factory.mktemp("weights"), 3
    )


def test_hundreds_of_changed_bodies_are_answered_or_refused(server: Server, weights: Path) -> None:
    assert_survives(server, valid_bodies(weights), 150, seed=0)


@pytest.mark.slow
def test_thousands_of_changed_bodies_are_answered_or_refused(server: Server, weights: Path) -> None:
    assert_survives(server, valid_bodies(weights), 3000, seed=1)


def test_requests_made_from_the_openapi_document_are_no_server_errors(server: Server) -> None:
    from_the_openapi_document(server, 15)


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
def test_a_request_beyond_the_limits_is_refused_by_name(server: Server, body: dict[str, Any], message: str) -> None:
    assert_refused(server, {"token_ids": [1], "sampling_params": {}} | body, message)


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
    server: Server, sampling: dict[str, Any], message: str
) -> None:
    assert_refused(server, {"token_ids": [1], "sampling_params": sampling}, message)


def assert_refused(server: Server, body: dict[str, Any], message: str) -> None:
    answer = server.client.post(PATH, json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_extreme_sampling_that_is_allowed_is_answered(server: Server) -> None:
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
        answer = server.client.post(PATH, json=body)
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
def test_malformed_json_is_refused(server: Server, content: bytes) -> None:
    for path in (PATH, "/v1/weights"):
        answer = server.client.post(path, content=content, headers={"content-type": JSON})
        # a body of new weights names a folder, so its limit is lower
        too_large = path == "/v1/weights" and len(content) > 16 * 1024
        assert answer.status_code == (413 if too_large else 400), (path, answer.text)


def test_other_content_types_and_large_bodies_are_refused(server: Server) -> None:
    for path in (PATH, "/v1/weights"):
        assert server.client.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        large = b" " * (9 * 2**20)
        assert server.client.post(path, content=large, headers={"content-type": JSON}).status_code == 413
