"""`stillhouse export --push` uploads the exported folder to a hub over HTTP, here a server on loopback."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from artefacts.write_artefacts import ARTEFACTS
from huggingface_hub import constants
from kit.runs import ROOT, contents, run
from kit.stub_servers import QuietHandler

import stillhouse

TOKEN = "hf_test"


class StubHub:
    """repositories: the files of each repository, by name. private: those that were created as private ones.

    Requests need the token `TOKEN`. fails: routes that get status 403, such as "/commit/".
    """

    def __init__(self, *fails: str) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.messages: list[str] = []
        self.fails = fails
        self._objects: dict[str, bytes] = {}
        hub = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                hub.answer(self, self._body())

            def do_PUT(self) -> None:
                content = self._body()
                hub._objects[hashlib.sha256(content).hexdigest()] = content
                self.reply(200, {})

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: QuietHandler, body: bytes) -> None:
        path = request.path.partition("?")[0]
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            request.reply(401, {"error": "Invalid username or password."})
        elif any(part in path for part in self.fails):
            request.reply(403, {"error": "no rights"})  # a client repeats a request that gets 500
        elif path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            errors = [] if isinstance(metadata, dict) else [{"message": "the card has no metadata"}]
            request.reply(400 if errors else 200, {"errors": errors, "warnings": []})
        elif path == "/api/repos/create":
            self._create(request, json.loads(body))
        elif "/preupload/" in path:
            files = [
                {
                    "path": path,
                    "uploadMode": "lfs" if path.endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for path in (file["path"] for file in json.loads(body)["files"])
            ]
            request.reply(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.url}/objects/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            request.reply(200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit(request, path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            request.reply(404, {"error": f"no route {path}"})

    def _create(self, request: QuietHandler, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        is_new = name not in self.repositories
        self.repositories.setdefault(name, {})
        if is_new and (wanted.get("private") or wanted.get("visibility") == "private"):
            self.private.add(name)
        request.reply(200 if is_new else 409, {"url": f"{self.url}/{name}"})

    def _commit(self, request: QuietHandler, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.repositories[name][value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile", line
                self.repositories[name][value["path"]] = self._objects[value["oid"]]
        commit = "0" * 40
        request.reply(200, {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit})


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint, in the working directory; the hub's settings are those of a user without a login."""
    shutil.copytree(ARTEFACTS / stillhouse.__version__, tmp_path / "files")
    monkeypatch.chdir(tmp_path / "files")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tmp_path / "files" / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with StubHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def test_the_repository_has_the_exported_files(hub: StubHub) -> None:
    ended = run("export", "run", "--out", "exported", "--push", "me/student")
    assert hub.repositories == {"me/student": contents(Path("exported"))}
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= hub.repositories["me/student"].keys()
    assert hub.private == {"me/student"}
    assert hub.messages == ["stillhouse: exported step 2"]
    assert ended.out == f"exported step 2 to exported\npushed: {hub.url}/me/student/commit/{'0' * 40}\n"
    assert TOKEN not in ended.out + ended.err


def test_a_repository_that_exists_gets_the_new_files(hub: StubHub) -> None:
    hub.repositories["me/student"] = {"notes.txt": b"kept"}
    run("export", "run", "--out", "exported", "--no-card", "--push", "me/student")
    assert hub.repositories == {"me/student": contents(Path("exported")) | {"notes.txt": b"kept"}}
    assert not hub.private


@pytest.mark.parametrize(("token", "name"), [("hf_wrong", "me/student"), (TOKEN, "no name")])
def test_what_the_hub_refuses_is_found_before_the_export(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, token: str, name: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    ended = run("export", "run", "--out", "exported", "--push", name, code=1)
    assert ended.err.startswith(f"error: --push {name}: the hub did not accept the repository: ")
    assert len(ended.err.splitlines()) == 1
    assert not Path("exported").exists()


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with StubHub() as hub:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    ended = run("export", "run", "--out", "exported", "--push", "me/student", code=1)
    assert ended.err.startswith("error: --push me/student: the hub did not accept the repository: ")


def test_a_failed_upload_leaves_the_folder_and_says_how_to_repeat_it(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fails = ("/objects/batch",)
    ended = run("export", "run", "--out", "exported", "--push", "me/student", code=1)
    assert "exported is complete; upload it with `hf upload me/student exported`" in ended.err
    assert (Path("exported") / "model.safetensors").exists()
    assert hub.repositories == {"me/student": {}}


@pytest.mark.slow
def test_the_environment_names_the_hub(hub: StubHub, tmp_path: Path) -> None:
    """In a process of its own, as a user gives the command."""
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "stillhouse", "export", "run", "--out", "exported", "--push", "me/student"]
    ended = subprocess.run(
        command,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert hub.repositories == {"me/student": contents(Path("exported"))}
