"""HTTP servers on loopback that answer as vLLM and SGLang do (`stub_vllm`, `stub_sglang`), with a real model.

A server can be killed in the middle of anything, and starts again with its first weights, as a real one does. The
forms are those of recorded answers (tests/kit/engines), with which `test_teacher_engines.py` and
`test_rollout_engines.py` compare these. The real engine is tried by `make test-engines`.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from kit.stub_model import KilledError, StubModel

#: gets the handler and the true answer, and answers in its own way
Fault = Callable[[Any, Any], None]


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def reply(self, status: int, content: Any, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


def busy(handler: QuietHandler, answer: Any) -> None:
    handler.reply(429, {"error": {"message": "the queue is full"}}, Retry_After="0")


def broken(handler: QuietHandler, answer: Any) -> None:
    handler.reply(500, {"error": {"message": "out of memory"}})


def reset(handler: QuietHandler, answer: Any) -> None:
    handler.reset()


class StubHandler(QuietHandler):
    """A route is a method: `post_v1_completions` answers POST /v1/completions.

    state: the server. model: of the process that this connection was made to.
    """

    state: ClassVar["StubServer"]
    model: ClassVar[StubModel]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        self.state.requests.append((self.path, body))
        if (hook := self.state.before.pop(path, None)) is not None:
            hook()
        self._route("post" + path.replace("/", "_"), body)

    def do_GET(self) -> None:
        self._route("get" + self.path.partition("?")[0].replace("/", "_"))

    def _route(self, name: str, *arguments: Any) -> None:
        route = getattr(self, name, None)
        try:
            if self.model.dead:  # this connection was made to the process that was killed
                raise KilledError
            if route is None:
                self.reply(404, {"detail": "Not Found"})
            else:
                route(*arguments)
        except KilledError:
            self.reset()

    def refuse(self, status: int, message: str) -> None:
        self.reply(status, {"error": {"message": message, "type": "BadRequestError", "code": status}})

    def answer(self, content: dict[str, Any]) -> None:
        """The answer of a completion, or a fault in its place."""
        if self.state.faults:
            self.state.faults.pop(0)(self, content)
        else:
            self.reply(200, content)


class StubServer:
    """A server that can be killed and started again at the same address.

    faults: the next answers to completions. before: by path, what happens once before its next request is processed.
    failing_loads: so many loads of weights fail in the middle. requests: all of them, by path.
    """

    def __init__(self, kind: type[StubHandler], folder: Path, **options: Any):
        self.kind, self.folder, self.options, self.port = kind, folder, options, 0
        self.faults: list[Fault] = []
        self.before: dict[str, Callable[[], None]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.failing_loads = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.model = StubModel(self.folder, **self.options)
        bound = type("Bound", (self.kind,), {"state": self, "model": self.model})
        self.server = listen(bound, self.port)
        self.port = self.server.server_port

    def kill(self) -> None:
        self.model.change(dead=True)
        self.server.shutdown()
        self.server.server_close()

    def restart(self) -> None:
        self.kill()
        self.start()


def listen(handler: type[QuietHandler], port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    return server


@contextmanager
def stub_server(kind: type[StubHandler], folder: Path, **options: Any) -> Iterator[StubServer]:
    server = StubServer(kind, folder, **options)
    try:
        yield server
    finally:
        server.kill()
