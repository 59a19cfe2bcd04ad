"""An HTTP server on loopback that answers as the Hugging Face hub does to a client that uploads a folder.

It has the routes for creating a repository, for checking a card's metadata, for asking which files are large, for
uploading these by Git LFS, and for the commit. It has not the chunked storage (Xet), which a client leaves out with
HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import yaml

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

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub.answer(self, self._body())

            def do_PUT(self) -> None:
                content = self._body()
                hub._objects[hashlib.sha256(content).hexdigest()] = content
                reply(self, 200, {})

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                content = b""
                while size := int(self.rfile.readline(), 16):
                    content += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return content

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        path = request.path.partition("?")[0]
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            reply(request, 401, {"error": "Invalid username or password."})
        elif any(part in path for part in self.fails):
            reply(request, 403, {"error": "no rights"})  # a client repeats a request that gets 500
        elif path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            errors = [] if isinstance(metadata, dict) else [{"message": "the card has no metadata"}]
            reply(request, 400 if errors else 200, {"errors": errors, "warnings": []})
        elif path == "/api/repos/create":
            self._create(request, json.loads(body))
        elif "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": mode_of(file["path"]), "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            reply(request, 200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.url}/objects/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            reply(request, 200, {"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            self._commit(request, path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            reply(request, 404, {"error": f"no route {path}"})

    def _create(self, request: BaseHTTPRequestHandler, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        is_new = name not in self.repositories
        self.repositories.setdefault(name, {})
        if is_new and (wanted.get("private") or wanted.get("visibility") == "private"):
            self.private.add(name)
        reply(request, 200 if is_new else 409, {"url": f"{self.url}/{name}"})

    def _commit(self, request: BaseHTTPRequestHandler, name: str, body: bytes) -> None:
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
        reply(request, 200, {"commitUrl": f"{self.url}/{name}/commit/{commit}", "commitOid": commit})


def mode_of(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


def reply(request: BaseHTTPRequestHandler, status: int, content: Any) -> None:
    encoded = json.dumps(content).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(encoded)))
    request.end_headers()
    request.wfile.write(encoded)
