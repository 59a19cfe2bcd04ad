"""Before models are read, the command line tests whether the hub can be reached, also behind a proxy."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from stillhouse.cli.hub import settle_offline

HUB = "HF_HUB_OFFLINE"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HUB, "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for variable in (name, name.lower()):
            monkeypatch.setenv(variable, "")  # so that what `settle_offline` sets is undone
            monkeypatch.delenv(variable)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_hub_that_does_not_answer_is_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], closed: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed}")
    settle_offline([None, "/"])
    assert HUB not in os.environ
    settle_offline(["a/b"])
    assert os.environ[HUB] == "1"
    warning = "warning: 127.0.0.1 cannot be reached (Connection refused): only models"
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize("scheme", ["http://", "socks5h://", ""])
def test_behind_a_proxy_the_proxy_is_asked(
    monkeypatch: pytest.MonkeyPatch, listening: int, closed: int, variable: str, scheme: str
) -> None:
    """Of any kind, and also one for all schemes: the hub itself has no address here."""
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{listening}")
    settle_offline(["a/b"])
    assert HUB not in os.environ
    monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{closed}")
    settle_offline(["a/b"])
    assert os.environ[HUB] == "1"


@pytest.mark.parametrize(
    ("variable", "value"),
    [*(("HF_ENDPOINT", f"http://{host}") for host in ("hub:port", "[::1", "a..b")), ("HTTPS_PROXY", "http://x:y")],
)
def test_an_address_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"^{variable}: the hub's address is not readable"):
        settle_offline(["a/b"])


class Hub(BaseHTTPRequestHandler):
    """Has the model a/b with the revision main."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        _, owner, name, _, revision, file = self.path.split("/")
        is_there = (owner, name, revision, file) == ("a", "b", "main", "config.json")
        self.send_response(200 if is_there else 404)
        code = "RevisionNotFound" if (owner, name) == ("a", "b") else "RepoNotFound"
        headers = {"X-Error-Code": code, "X-Repo-Commit": "0" * 40, "ETag": '"1"', "Content-Length": "2"}
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        self.asked.append(self.path)


def test_a_model_that_the_hub_does_not_have_is_named_before_torch_is_imported(tmp_path: Path) -> None:
    """Online and offline; a model that was downloaded before is not asked for."""
    code = """
import sys
from stillhouse.cli.hub import require_on_hub
for model in [("a/b", None), ("a/c", None), ("a/b", "v2"), ("a/b", "main")]:
    try:
        require_on_hub({"student.model": model})
        print("there")
    except ValueError as error:
        print(error)
print({"torch", "transformers", "numpy"} & {*sys.modules})
"""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    answers = []
    for offline in ("0", "1"):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | {HUB: offline}, check=True)
        answers.append(done.stdout.splitlines())
        asked = Hub.asked.copy()
        Hub.asked.clear()
    server.shutdown()
    server.server_close()
    hub = "there is no such folder, and the hub has no such model, or gives it only with a token (HF_TOKEN)"
    cache = "there is no such folder, and no such model was downloaded before (offline mode: the hub is not used)"
    for answer, problem in zip(answers, (hub, cache), strict=True):
        first, second, third, fourth, imported = answer
        assert (first, fourth, imported) == ("there", "there", "set()")
        assert second == f"student.model: got a/c: {problem}"
        assert third == f"student.model: got a/b with revision v2: {problem}"
    assert asked == []


def test_a_proxy_that_refuses_is_left_to_the_libraries(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:  # it answers CONNECT with 501
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        environment = {"HTTPS_PROXY": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        code = "from stillhouse.cli.hub import require_on_hub; require_on_hub({'student.model': ('a/b', None)})"
        subprocess.run([sys.executable, "-c", code], env=os.environ | environment, check=True)
        server.shutdown()
