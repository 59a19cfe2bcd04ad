"""Clients that say nothing, say too much or come too late: the others are answered all the time."""

import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from kit import first_is_quick
from kit.ranks import free_port
from kit.runs import Command, wait_for
from kit.serving import GENERATION, SCORING, Server, slow_down

from stillhouse.serving import JSON
from stillhouse.serving.server import connection

GENERATE, SCORE = "/inference/v1/generate", "/v1/score"
JSON_LIMIT = 8 * 2**20
#: fewer connections than in earnest, so that the tests need not open thousands
FEW = 200


def few_connections(seconds: float) -> None:
    connection.CONNECTIONS, connection.SPARE, connection.HEADER_SECONDS = FEW, 20, seconds


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """Connections are handled in the same way in both roles."""
    with Server(folder, hook=few_connections, hook_arguments=(1.5,)) as running:
        yield running


def opened(server: Server, content: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    client.sendall(content)
    return client


def is_answered(server: Server, path: str = "/v1/info") -> bool:
    return httpx2.get(server.url + path, timeout=10).status_code == 200


def is_closed(client: socket.socket) -> bool:
    """Read what the server has sent, and return whether it has closed the connection."""
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


HALVES = {
    "idle": b"",
    "half a header": b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx-more: a",
    "idle after an answer": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "half a second header": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /v1",
}


@pytest.fixture(scope="module")
def patient_server(folder: Path) -> Iterator[Server]:
    """A server that closes a silent connection only to make room for another."""
    with Server(folder, hook=few_connections, hook_arguments=(600,)) as running:
        yield running


@pytest.mark.parametrize("kind", HALVES)
def test_connections_that_say_nothing_cost_nobody_a_place(patient_server: Server, kind: str) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(opened(patient_server, HALVES[kind])) for _ in range(FEW + 50)]
        for path in ("/healthz", "/v1/info"):
            assert is_answered(patient_server, path)
        wait_for(lambda: [is_closed(client) for client in clients[:49]] == 49 * [True], 30)  # the oldest make room
        assert not is_closed(clients[-1])


def test_connections_that_wait_are_closed_after_some_seconds(server: Server) -> None:
    started = time.monotonic()
    with ExitStack() as clients:
        for client in [clients.enter_context(opened(server, content)) for content in HALVES.values()]:
            while client.recv(4096):
                pass
            assert time.monotonic() - started < 15


def test_a_header_that_comes_byte_by_byte_is_given_up(server: Server) -> None:
    with opened(server, b"GET /v1/info HTTP/1.1\r\nhost: localhost\r\nx: ") as client:
        started = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started < 30:
                client.sendall(b"a")
                time.sleep(0.2)
        assert time.monotonic() - started < 12


def test_requests_without_their_bodies_leave_room_for_probes(server: Server) -> None:
    head = f"POST {SCORE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {JSON}\r\ncontent-length: 9\r\n\r\n{{"
    with ExitStack() as clients:
        for _ in range(FEW):
            clients.enter_context(opened(server, head.encode()))
        for _ in range(5):
            assert is_answered(server, "/healthz")
        refused = httpx2.get(server.url + "/v1/info", timeout=10)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "too many requests at a time"
        assert refused.headers["retry-after"] == "1"
        # only some of those that were refused before may still send their bodies, each for a second or two
        wait_for(lambda: _gets_503(server, head.replace("length: 9", "length: 9999999") + " " * 9999998), 20)
    wait_for(lambda: is_answered(server), 30)


def _gets_503(server: Server, request: str) -> bool:
    """The client sends all of it before it reads."""
    try:
        with opened(server, request.encode()) as client:
            return client.recv(4096).startswith(b"HTTP/1.1 503 ")
    except ConnectionError:
        return False


@pytest.mark.parametrize("more", [1, 1000, 2**20, 60 * 2**20])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunks"])
def test_a_body_over_the_limit_gets_413_and_no_reset(server: Server, more: int, is_chunked: bool) -> None:
    """The client sends all of it before it reads, as most of them do."""
    content = b" " * (JSON_LIMIT + more)
    body: Any = iter([content]) if is_chunked else content
    answer = httpx2.post(server.url + SCORE, content=body, headers={"content-type": JSON}, timeout=30)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].startswith("the body is too large")


@pytest.mark.parametrize(
    ("target", "headers", "status", "pause"),
    [
        (SCORE, "connection: close", 413, 0),
        (SCORE, "expect: 100-continue", 413, 0),
        ("/v1/nothing", "connection: close", 404, 0),
        (SCORE, "content-type: text/plain\r\nconnection: close", 415, 0),
        (SCORE, "accept: */*", 413, 0.25),  # the rest arrives for longer than a connection may wait for a header
    ],
)
def test_an_early_answer_is_followed_by_no_reset(
    server: Server, target: str, headers: str, status: int, pause: float
) -> None:
    """Also if the connection is closed after it. Python's urllib asks for that, and sends all of its body before."""
    kind, parts = "" if "content-type" in headers else f"content-type: {JSON}\r\n", 9 if pause else 150
    head = f"POST {target} HTTP/1.1\r\nhost: localhost\r\n{kind}{headers}\r\ncontent-length: {parts * 2**20}\r\n\r\n"
    with opened(server, head.encode()) as client:
        for _ in range(parts):
            client.sendall(b" " * 2**20)
            time.sleep(pause)
        assert client.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("expect", ["expect: 100-continue\r\n", ""])
def test_a_length_over_the_limit_is_refused_before_the_body_is_read(server: Server, expect: str) -> None:
    head = f"POST {SCORE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{expect}"
    with opened(server, f"{head}content-length: {10**9}\r\n\r\n".encode()) as client:
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")
        while expect and client.recv(4096):
            pass


@pytest.mark.parametrize("path", ["/v1/info/", "/healthz/", "/v1/files/config.json/", "/v1/weights/"])
def test_no_answer_names_the_host_of_the_request(server: Server, path: str) -> None:
    with opened(server, f"GET {path} HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n".encode()) as client:
        content = b""
        while more := client.recv(4096):
            content += more
    assert content.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 421 "))
    assert b"evil.example" not in content


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example:8000"}, 421),
        ({"host": "192.168.0.5:8000"}, 421),
        ({"host": "[::1"}, 421),
        ({"host": "LOCALHOST:1"}, 200),
        ({"host": "127.3.2.1:80"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
def test_without_a_token_only_names_of_this_machine_are_served(server: Server, headers: Any, status: int) -> None:
    answer = server.client.get("/v1/info", headers=headers)
    assert answer.status_code == status
    assert status == 200 or "STILLHOUSE_TOKEN" in answer.json()["error"]["message"]
    assert server.client.get("/healthz", headers=headers).status_code == 200


MANY = 2_000_000
LISTS = {
    "empty documents": (SCORE, b'{"token_ids":[' + b"[]," * MANY + b"[1]]}"),
    "documents": (SCORE, b'{"token_ids":[' + b"[1]," * MANY + b"[1]]}"),
    "ids of a document": (SCORE, b'{"token_ids":[[1]],"signal":"chosen","ids":[[' + b"[]," * MANY + b"[1]]]}"),
    "numbers for documents": (SCORE, b'{"token_ids":[' + b"1," * MANY + b"1]}"),
    "empty texts": ("/v1/completions", b'{"max_tokens":0,"prompt":[' + b'"",' * MANY + b'""]}'),
    "empty prompts": ("/v1/completions", b'{"max_tokens":0,"prompt":[' + b"[]," * MANY + b"[1]]}"),
    "negative ids": (GENERATE, b'{"sampling_params":{},"token_ids":[' + b"-1," * MANY + b"1]}"),
}


@pytest.mark.slow
def test_millions_of_wrong_values_are_refused_soon(server: Server, folder: Path) -> None:
    with Server(folder, "--generate") as writer:
        for path, content in LISTS.values():
            started, running = time.monotonic(), writer if path == GENERATE else server
            answer = httpx2.post(running.url + path, content=content, headers={"content-type": JSON}, timeout=120)
            assert answer.status_code == 400
            assert time.monotonic() - started < 3


def test_two_servers_on_one_port_the_second_ends_with_one_line(folder: Path) -> None:
    port = free_port()
    both = [Command("serve", folder, "--port", str(port), "--device", "cpu") for _ in range(2)]
    wait_for(lambda: any(command.process.exitcode is not None for command in both), 90)
    winner, loser = sorted(both, key=lambda command: command.process.exitcode is not None)
    assert loser.process.exitcode == 1
    assert "serving on" not in loser.out
    assert loser.err.startswith(f"error: host 127.0.0.1, port {port} cannot be used: ")
    assert loser.err.count("\n") == 1
    wait_for(lambda: "serving on" in winner.out)
    assert httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    winner.send(signal.SIGTERM)
    assert winner.wait() == 0


#: options, what is slow and by how many seconds, a request, and the tokens that three of them hold
ROLES: dict[str, tuple[list[str], tuple[str, float], dict[str, Any], float]] = {
    SCORE: (["--batch-tokens", "40"], (SCORING, 0.5), {"token_ids": [[5] * 37]}, 111.0),
    GENERATE: (
        ["--generate"],
        (GENERATION, 0.1),
        {"token_ids": [5], "sampling_params": {"max_tokens": 30, "seed": 1, "ignore_eos": True}},
        93.0,
    ),
}


@pytest.mark.parametrize("path", first_is_quick(ROLES))
def test_sigterm_answers_what_was_accepted_and_refuses_what_comes_later(folder: Path, path: str) -> None:
    options, delay, body, tokens = ROLES[path]

    def ask(_: int) -> httpx2.Response:
        return httpx2.post(server.url + path, json=body, timeout=60)

    with Server(folder, *options, hook=slow_down, hook_arguments=delay) as server, ThreadPoolExecutor(4) as threads:
        accepted = [threads.submit(ask, number) for number in range(3)]
        wait_for(lambda: f"stillhouse_held_tokens {tokens}" in server.client.get("/metrics").text)
        server.end()
        wait_for(lambda: "SIGTERM" in server.first.out + server.first.err)
        late = ask(9)
        assert (late.status_code, late.headers.get("connection")) == (503, "close")
        weights = {"folder": str(folder), "version": "late"}
        if path == GENERATE:
            assert httpx2.post(server.url + "/v1/weights", json=weights).status_code == 503
        assert httpx2.get(server.url + "/healthz").status_code == 503
        assert not any(future.done() for future in accepted[1:])
        for future in accepted:
            answer = future.result()
            assert answer.status_code == 200, answer.text
            assert path == SCORE or len(answer.json()["choices"][0]["token_ids"]) == 30
        assert server.first.wait(60) == 0


@pytest.mark.slow
def test_thousands_of_silent_connections_cost_nobody_a_place(folder: Path) -> None:
    """In earnest."""
    count = connection.most_connections() + 52
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * count:
        pytest.skip(f"{count} connections need more file descriptors")
    with Server(folder) as server, ExitStack() as clients:
        for number in range(count):
            clients.enter_context(opened(server, list(HALVES.values())[number % len(HALVES)]))
        stop, statuses = threading.Event(), list[int]()

        def keep_asking() -> None:
            while not stop.is_set():
                statuses.append(httpx2.post(server.url + SCORE, json={"token_ids": [[1, 2]]}, timeout=30).status_code)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        time.sleep(3)
        assert is_answered(server, "/healthz")
        stop.set()
        thread.join()
        assert set(statuses) == {200}
