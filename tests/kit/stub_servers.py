"""HTTP servers on loopback that answer as vLLM and SGLang do (`stub_vllm`, `stub_sglang`), with a real model.

A server can be killed in the middle of anything, and starts again with its first weights, as a real one does. The
forms are those of recorded answers (tests/kit/engines), with which `test_teacher_engines.py` and
`test_rollout_engines.py` compare these. The real engine is tried by `make test-engines`.
"""

import gzip
import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, repeat
from pathlib import Path
from typing import Any, ClassVar

import torch
from kit.tensors import tensors_in
from torch import Tensor
from transformers import AutoModelForCausalLM

#: transformers replaces methods of its classes while it loads a model, and two threads at once leave them replaced
LOADING = threading.Lock()


class KilledError(Exception):
    """The server has been killed while it answered."""


def load_model(folder: Path) -> Any:
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load_adapter(folder: Path, adapter: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_model(folder), adapter).eval()


class StubModel:
    """The model behind a server.

    max_logprobs: the cap on `prompt_logprobs`. scores_ids: it scores chosen ids. tokenizes: /tokenize answers.
    processed: log-probabilities are those among the tokens that can be sampled, after the temperature (vLLM's
    processed_logprobs); otherwise those of the logits. after_temperature: those of the logits after the temperature
    (SGLang, Stillhouse). keeps_head: loading does not change the output head. device: the one that /server_info
    names; None: it names none. seconds: for each token. mixes_weights: a completion that is begun with later weights
    than the first ones has its second token when newer weights have come, or after five seconds. takes_adapters: as
    with --enable-lora. max_lora_rank: that of SGLang. adapters, paths: the adapters that are loaded, and the folders
    of all that have been; uses: the number of requests that use each of them; unloading: those that are being
    unloaded. progress: by the seed of a request, how many tokens of it have been written.
    """

    max_logprobs = 64
    scores_ids = tokenizes = True
    processed = after_temperature = keeps_head = mixes_weights = takes_adapters = False
    device: str | None = "cpu"
    seconds = 0.0
    max_lora_rank = 64

    def __init__(self, folder: Path, **options: Any):
        self.model = load_model(folder)
        self.folder, self.label, self.paused, self.dead, self.aborted = folder, "default", False, False, 0
        self.adapters: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.uses = Counter[str]()
        self.unloading: set[str] = set()
        self.progress: dict[int, int] = {}
        self.first_label = ""
        self.changed = threading.Condition()
        vars(self).update(options)

    def hidden_SE(self, tokens: list[int]) -> Tensor:
        with self.changed, torch.no_grad():
            hidden: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden

    def log_probs_SV(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            return self.model.lm_head(self.hidden_SE(tokens)).float().log_softmax(-1)

    def change(self, **state: Any) -> None:
        with self.changed:
            vars(self).update(state)
            self.changed.notify_all()

    @contextmanager
    def using(self, adapter: str | None) -> Iterator[None]:
        try:
            with self.changed:
                self.uses[adapter or ""] += 1
            yield
        finally:
            with self.changed:
                self.uses[adapter or ""] -= 1
                self.changed.notify_all()

    def load(self, folder: Path, *, half: bool = False) -> None:
        """half: only some of the tensors, as when a load fails in the middle."""
        tensors = tensors_in(folder)
        names = sorted(tensors)[: len(tensors) // 2 if half else None]
        with self.changed, torch.no_grad():
            state = self.model.state_dict()
            for name in names:
                if not (self.keeps_head and name == "lm_head.weight"):
                    state[name].copy_(tensors[name])

    def write(self, tokens: list[int], options: dict[str, Any], adapter: str | None = None) -> dict[str, Any]:
        """Sample tokens one by one, each with the weights of its moment. options: as vLLM names them."""
        generator = torch.Generator().manual_seed(options["seed"])
        ids: list[int] = []
        rows: list[list[tuple[int, float]]] = []
        spans: list[dict[str, Any]] = []
        finish, aborts = "length", self.aborted
        model = self.model if adapter is None else self.adapters[adapter]  # until its end, whatever is unloaded
        while len(ids) < options["max_tokens"] and finish == "length":
            time.sleep(self.seconds)
            with self.changed:
                if self.mixes_weights and len(ids) == 1 and spans[0]["version"] != self.first_label:
                    begun = spans[0]["version"]
                    self.changed.wait_for(lambda: self.label != begun or self.dead, timeout=5)  # noqa: B023
                self.changed.wait_for(lambda: not self.paused or self.dead or self.aborted > aborts)
                if self.dead:
                    raise KilledError
                if self.aborted > aborts:
                    finish = "abort"
                    break
                with torch.no_grad():
                    logits_V = model(torch.tensor([tokens + ids])).logits[0, -1].float()
                label = self.label
                self.first_label = self.first_label or label
            log_probs_V, sampled_V = self._log_probs(logits_V, options)
            token = int(torch.multinomial(sampled_V.exp(), 1, generator=generator))
            rows.append(entries(log_probs_V, token, options["logprobs"]))
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": len(ids), "end": len(ids)})
            ids.append(token)
            self.progress[options["seed"]] = spans[-1]["end"] = len(ids)
            finish = "stop" if token in options["stop_token_ids"] else "length"
        return {"ids": ids, "rows": rows, "spans": spans, "finish": finish}

    def _log_probs(self, logits_V: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The log-probabilities that are answered, and those by which tokens are sampled."""
        if options["temperature"] == 0:  # the top token, with its log-probability among all of them
            log_probs_V = logits_V.log_softmax(-1)
            return log_probs_V, log_probs_V.where(log_probs_V == log_probs_V.max(), -math.inf)
        scaled_V = logits_V / options["temperature"]
        sampled_V = scaled_V
        if options["top_k"] > 0:
            sampled_V = scaled_V.masked_fill(scaled_V < scaled_V.topk(options["top_k"]).values[-1], -math.inf)
        sampled_V = sampled_V.log_softmax(-1)
        if self.processed:
            return sampled_V, sampled_V
        return (scaled_V if self.after_temperature else logits_V).log_softmax(-1), sampled_V


def entries(log_probs_V: Tensor, token: int, count: int | None) -> list[tuple[int, float]]:
    """A token and the top tokens, with their log-probabilities."""
    top = log_probs_V.topk(count).indices.tolist() if count else []
    return [(number, float(log_probs_V[number])) for number in dict.fromkeys([token, *top])]


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


def raw(*parts: bytes, seconds: float = 0.0, forever: bool = False) -> Fault:
    """Bytes in place of an answer, `seconds` apart. forever: the last part again and again, until the client goes."""

    def fault(handler: QuietHandler, answer: Any) -> None:
        handler.close_connection = True
        with suppress(OSError):
            for part in chain(parts, repeat(parts[-1]) if forever else ()):
                handler.wfile.write(part)
                time.sleep(seconds)

    return fault


def body(content: bytes, *, status: int = 200, more: bytes = b"") -> Fault:
    head = b"HTTP/1.1 %d Fine\r\nContent-Length: %d\r\n%s\r\n" % (status, len(content), more)
    return raw(head + content)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"
_NESTED = b"[" * 60_000 + b"]" * 60_000
#: what no server should send. None of it may end a client by anything but an error that names the server, or later
#: than its limit
HOSTILE: dict[str, Fault] = {
    "drips": raw(_HEAD, b"1", seconds=0.05, forever=True),
    "drips headers": raw(b"HTTP/1.1 200 OK\r\nX: ", b"1", seconds=0.05, forever=True),
    "processes for ever": raw(b"HTTP/1.1 102 Processing\r\n\r\n", seconds=0.05, forever=True),
    "continues for ever, at once": raw(b"HTTP/1.1 100 Continue\r\n\r\n" * 400, forever=True),
    "never ends": raw(b"HTTP/1.1 200 OK\r\n\r\n", b"1" * 2**16, forever=True),
    "chunks of a byte, for ever": raw(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n" * 2000, forever=True
    ),
    "nests": body(_NESTED),
    "nests in an error": body(_NESTED, status=400),
    "opens only": body(b"[" * 60_000),
    **{
        f"charset {name!r}, {status}": body(
            b'{"a": 1}\xff\x1b[2J', status=status, more=b"Content-Type: text/html; charset=%s\r\n" % name
        )
        for name in (b"zlib", b"undefined", b"rot13", b"base64", b"idna", b"punycode", b"\xff")
        for status in (200, 400)
    },
    "numbers of 9,999 digits": body(b'{"reward": %s}' % (b"9" * 9999)),
    "half of a surrogate pair": body(b'{"reward": "\\ud800", "error": {"message": "\\ud800"}}', status=400),
    "a message that is a number": body(b'{"error": {"message": %s}}' % (b"9" * 4000), status=422),
    "a bomb in gzip": body(gzip.compress(bytes(2**26)), more=b"Content-Encoding: gzip\r\n"),
    "is no gzip": body(b"{}", status=400, more=b"Content-Encoding: gzip, br, \x1b[2J\r\n"),
    "more than it says": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n" + b"12" * 9),
    "less than it says": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n{}"),
    "a negative length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}"),
    "two lengths": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}"),
    "many headers": body(b"{}", more=b"X-A: 1\r\n" * 50_000),
    "a cookie": body(b"{}", status=400, more=b'Set-Cookie: a="\x1b; expires=;;=; domain=\xff\r\n'),
    "no HTTP": raw(b"\x16\x03\x01\x00\x00 no HTTP\r\n\r\n"),
    "HTTP/0.9": raw(b"{}"),
    "HTTP/1.0": raw(b"HTTP/1.0 200 OK\r\n\r\n[]"),
    "nothing": raw(b""),
    "escapes": body(b'{"error": {"message": "\\u001b]0;owned\\u0007\\u001b[2J\\nstep 9/9"}}', status=400),
    "escapes in its status": raw(b"HTTP/1.1 400 \x1b[2J\r\nContent-Length: 0\r\n\r\n"),
    "a redirect to nowhere": body(b"", status=302, more=b"Location: http://[::\r\n"),
    "later": body(b"", status=503, more=b"Retry-After: 99999999999\r\n"),
    "later, in other digits": body(b"", status=429, more="Retry-After: ٣\r\n".encode()),
    **{f"an empty {status}": body(b"", status=status) for status in (200, 400, 500)},
    **{f"{status}": raw(b"HTTP/1.1 %d X\r\n\r\n" % status) for status in (101, 204, 304, 199, 999)},
}


@contextmanager
def hostile_server(*faults: Fault) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Answers with the faults, one after the other, and the last one for ever. Yields also its requests' headers."""
    left, headers = list(faults), list[dict[str, str]]()

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            headers.append(dict(self.headers.items()))
            (left.pop(0) if len(left) > 1 else left[0])(self, None)

        do_POST = do_GET

    server = listen(Handler)
    try:
        yield f"http://127.0.0.1:{server.server_port}", headers
    finally:
        server.shutdown()
        server.server_close()
