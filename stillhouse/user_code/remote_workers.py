"""Workers on other hosts of a job: the first process of each of them serves workers, and rank 0 calls them.

A connection stands for one worker, which starts with it and ends with it. Both ends first prove that they have the
job's token, without sending it. Messages are JSON, never pickled. The server only calls the functions of its own
configuration.

    server   a random nonce
    client   another nonce, and an HMAC of both with the token; then "start", and calls one by one
    server   another HMAC of both; then an answer to each message of the client
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from stillhouse.user_code.episodes import Episode, episode_of
from stillhouse.user_code.messages import Messages
from stillhouse.user_code.worker import ERROR, VALUE
from stillhouse.user_code.worker_pool import SECONDS_TO_START, HostLostError, LostError, Worker, new_worker

#: the key of an answer: the reason for which the worker is lost; further keys are those of `worker.py`
_LOST = "lost"
_BYTES, _SECONDS_TO_CONNECT = 32, 10.0
#: how much later than the server rank 0 gives up a call: the server needs time to end a worker, and the network, too
_SECONDS_LATER = 30.0


class WorkerServer:
    """Serves workers to rank 0, on a port of its own.

    functions, seconds, memory_gib: see `WorkerPool`. host: the address on which it listens. token: the job's secret.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, str]],
        *,
        seconds: float,
        memory_gib: float | None,
        host: str,
        token: bytes,
    ):
        self._functions, self._seconds, self._memory_gib, self._token = functions, seconds, memory_gib, token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._lock, self._is_closed = threading.Lock(), False
        self._workers: set[Worker] = set()
        self._clients: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._accept, name="worker server", daemon=True).start()

    def close(self) -> None:
        """Kill the workers and the programs that they have started."""
        with self._lock:
            self._is_closed = True
            for worker in self._workers:
                worker.kill()
            for client in self._clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not end `accept`
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            with self._lock:
                if self._is_closed:
                    client.close()
                    return
                thread.start()
                self._clients.add(client)
                self._threads = [*(thread for thread in self._threads if thread.is_alive()), thread]

    def _serve(self, client: socket.socket) -> None:
        """Serve one worker until the client closes the connection, the worker is lost or the server is closed."""
        worker: Worker | None = None
        try:
            with suppress(OSError, EOFError):
                if not _accepted(client, self._token):
                    return
                messages = _messages(client)
                messages.receive()
                try:
                    worker = self._start(messages)
                except LostError as error:
                    messages.send(json.dumps({_LOST: str(error)}).encode())
                answer = {} if worker is None else _answer(worker.require_started)
                while worker is not None:
                    # without a time limit: rank 0 alone decides when it gives up, and `close` ends the connection
                    messages.send(json.dumps(answer).encode())
                    answer = _answer(self._call, worker, json.loads(messages.receive()))
        finally:
            with self._lock:
                self._clients.discard(client)
                if worker is not None:
                    self._workers.discard(worker)
            client.close()
            if worker is not None:
                worker.end()

    def _start(self, messages: Messages) -> Worker | None:
        with self._lock:
            if self._is_closed:
                return None
            # the client sends nothing during a call: what can be read then is the connection's end
            worker = new_worker(self._functions, self._memory_gib, lambda: messages.is_readable)
            self._workers.add(worker)
            return worker

    def _call(self, worker: Worker, request: Sequence[Any]) -> Mapping[str, Any]:
        at, arguments, more = request
        others = [Episode.from_json(value) if isinstance(value, dict) else value for value in more]
        return worker.call(at, (*arguments, *others), self._seconds)


class RemoteHost:
    """Another host of the job, on whose server rank 0 starts workers. name: for messages."""

    def __init__(self, name: str, host: str, port: int, token: bytes):
        self.name, self._address, self._token = f"{name} ({host})", (host, port), token

    def require_server(self) -> None:
        """Raise ValueError if there is no connection to the host's server."""
        try:
            self._connected().close()
        except HostLostError as error:
            host, port = self._address
            raise ValueError(
                f"rollout.workers: {error}, which listens on port {port} of {host} for calls of rank 0: expected a "
                "network in which the job's hosts reach all ports of each other, or rollout.workers=0"
            ) from error

    def start(self) -> "RemoteWorker":
        """Start a worker. Raises HostLostError."""
        return RemoteWorker(self.name, self._connected())

    def _connected(self) -> socket.socket:
        try:
            server = socket.create_connection(self._address, _SECONDS_TO_CONNECT)
            if not _proven(server, self._token):
                raise HostLostError(f"another program than this job's answers in place of the workers on {self.name}")
        except (OSError, EOFError) as error:
            raise HostLostError(f"there is no connection to the workers on {self.name} ({error})") from error
        return server


class RemoteWorker:
    """A worker on another host, with the methods of `Worker`. host: its name."""

    def __init__(self, host: str, server: socket.socket):
        self._host, self._server = host, server
        self._messages = _messages(server)

    def require_started(self) -> Mapping[str, str]:
        """See `Worker.require_started`."""
        answer = self._answer(b"start", SECONDS_TO_START)
        if ERROR in answer:
            raise ValueError(f"{answer[ERROR]}\n(on {self._host})")
        sources: Mapping[str, str] = answer[VALUE]
        return sources

    def call(self, at: int, arguments: Any, seconds: float) -> Mapping[str, Any]:
        """See `Worker.call`. The arguments are representable in JSON; the pool has checked it."""
        episode = episode_of(arguments)
        calls = 1 if episode is None else episode.calls  # the server's worker may lack the object
        more = [vars(value) if isinstance(value, Episode) else value for value in arguments[4:]]
        return self._answer(json.dumps([at, arguments[:4], more]).encode(), seconds * calls)

    def kill(self) -> None:
        """Close the connection, at which the server ends the worker. May be called from any thread."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """As `kill`, but in the thread of the calls."""
        self.kill()
        self._server.close()

    def _answer(self, message: bytes, seconds: float) -> Mapping[str, Any]:
        seconds += _SECONDS_LATER
        until = time.monotonic() + seconds
        try:
            self._messages.send(message, until)
            answer: Mapping[str, Any] = json.loads(self._messages.receive(until))
        except TimeoutError:
            raise HostLostError(f"the workers on {self._host} have not answered for {seconds:g} s") from None
        except (EOFError, OSError) as error:
            raise HostLostError(f"the connection to the workers on {self._host} has ended") from error
        if _LOST in answer:
            raise LostError(answer[_LOST])
        return answer


def _answer(call: Callable[..., Any], *arguments: Any) -> Mapping[str, Any]:
    try:
        value = call(*arguments)
    except LostError as error:
        return {_LOST: str(error)}
    except ValueError as error:
        return {ERROR: str(error)}
    return value if arguments else {VALUE: value}


def _accepted(client: socket.socket, token: bytes) -> bool:
    """On the server: whether the client has the token. Raises OSError or EOFError if it does not answer."""
    client.settimeout(_SECONDS_TO_CONNECT)
    client.sendall(nonce := secrets.token_bytes(_BYTES))
    other, proof = _received(client), _received(client)
    if not hmac.compare_digest(proof, _mac(token, b"client", nonce, other)):
        return False
    client.sendall(_mac(token, b"server", nonce, other))
    return True


def _proven(server: socket.socket, token: bytes) -> bool:
    """On rank 0: whether the server has the token. Raises OSError or EOFError if it does not answer."""
    nonce, other = _received(server), secrets.token_bytes(_BYTES)
    server.sendall(other + _mac(token, b"client", nonce, other))
    return hmac.compare_digest(_received(server), _mac(token, b"server", nonce, other))


def _received(end: socket.socket) -> bytes:
    content = b""
    while len(content) < _BYTES:
        part = end.recv(_BYTES - len(content))
        if not part:
            raise EOFError("closed")
        content += part
    return content


def _mac(token: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token, b"".join(parts), "sha256")


def _messages(end: socket.socket) -> Messages:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Messages(end)
