"""An HTTP proxy on loopback between a client and a teacher's server, which damages some of the answers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2
from kit.stub_servers import Fault, QuietHandler, listen

#: of requests for signals, completions and rewards
PATHS = ("/v1/score", "/pooling", "/v1/completions", "/generate", "/inference", "/reward")


class Proxy:
    """Forwards requests to `upstream`. Each request to a scoring path takes the next one of `faults`, if any is left.

    scored: how many requests to scoring paths have been forwarded; under_way: how many of them have no answer yet.
    bodies: the requests to /v1/score. change: is applied to the body of every true answer to such a request.
    """

    def __init__(self, upstream: str):
        self.upstream, self.faults, self.scored = upstream, list[Fault](), 0
        self.change: Callable[[bytes], bytes] = bytes
        self.bodies: list[bytes] = []
        self.under_way = 0
        self.lock = threading.Lock()
        self.client = httpx2.Client(timeout=60, trust_env=False)

    def after(self, requests: int, faults: list[Fault]) -> None:
        """Begin with faults after some requests, such as those of the proof at a run's start."""
        self.faults = [*[true] * requests, *faults]

    def next_fault(self, path: str) -> Fault | None:
        with self.lock:
            if not path.startswith(PATHS):
                return None
            self.scored += 1
            return self.faults.pop(0) if self.faults else None


class Handler(QuietHandler):
    proxy: Proxy

    def do_GET(self) -> None:
        self._forward(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/score":
            self.proxy.bodies.append(body)
        self.proxy.under_way += 1
        try:
            self._forward(body)
        finally:
            self.proxy.under_way -= 1

    def _forward(self, body: bytes | None) -> None:
        self.body = body
        fault = self.proxy.next_fault(self.path)
        names = ("content-type", "authorization")
        headers = {name: value for name, value in self.headers.items() if name.lower() in names}
        try:
            url = self.proxy.upstream + self.path
            answer = self.proxy.client.request(self.command, url, content=body, headers=headers)
        except httpx2.HTTPError:
            self.close_connection = True
            return
        if fault is not None:
            fault(self, answer)
        else:
            scores = self.command == "POST" and answer.status_code == 200
            self.answer(answer.status_code, self.proxy.change(answer.content) if scores else answer.content, answer)

    def answer(self, status: int, body: bytes, like: httpx2.Response) -> None:
        self.reply(
            status,
            body,
            **{name: like.headers[name] for name in ("content-type", "metadata") if name in like.headers},
        )


def true(handler: Handler, answer: httpx2.Response) -> None:
    handler.answer(answer.status_code, answer.content, answer)


def truncated(handler: Handler, answer: httpx2.Response) -> None:
    """The connection ends within the body."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(answer.content)))
    handler.end_headers()
    handler.wfile.write(answer.content[: len(answer.content) // 2])
    handler.wfile.flush()
    handler.close_connection = True


def shortened(handler: Handler, answer: httpx2.Response) -> None:
    """A whole HTTP answer with a body that ends too early."""
    handler.answer(200, answer.content[:-8], answer)


def slow_answer(handler: Handler, answer: httpx2.Response) -> None:
    time.sleep(0.5)
    handler.answer(answer.status_code, answer.content, answer)


def silent(handler: Handler, answer: httpx2.Response) -> None:
    """No answer for longer than any client of a test waits."""
    time.sleep(30)
    handler.close_connection = True


def with_body(change: Callable[[bytes], bytes]) -> Fault:
    """The true answer with another body."""

    def fault(handler: Handler, answer: httpx2.Response) -> None:
        handler.answer(200, change(answer.content), answer)

    return fault


@contextmanager
def proxy_to(upstream: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy and its URL."""
    proxy = Proxy(upstream)
    server = listen(type("Bound", (Handler,), {"proxy": proxy}))
    try:
        yield proxy, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        proxy.client.close()
