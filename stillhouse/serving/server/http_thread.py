"""The address of a server, and the thread that handles its HTTP requests."""

import socket
import threading
import time

import uvicorn
from starlette.types import ASGIApp

from stillhouse.serving.server.connection import Connection, Drained, Room
from stillhouse.serving.server.gate import AnsweredByProtocol, is_loopback

#: the most seconds for sending the last answers
LAST_SECONDS = 60.0
#: the most connections that the operating system queues until the server accepts them
BACKLOG = 2048


class HttpThread:
    """Runs uvicorn in a separate thread, where uvicorn installs no signal handlers. The main thread calls `end`.

    Raises OSError if another process has begun to listen on the address.
    """

    def __init__(self, app: ASGIApp, bound_socket: socket.socket):
        _listen(bound_socket)
        config = uvicorn.Config(
            AnsweredByProtocol(Room(Drained(app))),
            http=Connection,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(LAST_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound_socket],), name="http", daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(2 * LAST_SECONDS)


def check_address(host: str, token: str | None, *, require_token: bool) -> None:
    """Raise ValueError for a token that is invalid in a header, and for a non-loopback address without a token."""
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(
            "the token is empty or has characters that no HTTP header holds: expected ASCII without spaces"
        )
    if token is None and require_token and not is_loopback(host):
        raise ValueError(
            f"host {host} is reachable from other machines and no token is set: expected STILLHOUSE_TOKEN, --token, "
            "or --no-token to serve everyone"
        )


def ready_line(listening: socket.socket, token: str | None) -> str:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"serving on http://{shown}:{port}{'' if token is None else ' with a bearer token'}"


def bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on a socket with IPPROTO_TCP; without TCP_NODELAY, answers wait 40 ms for an ACK
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise _unusable(host, port, error) from error
    return listening


def _listen(bound_socket: socket.socket) -> None:
    """Two processes can bind the same port while neither listens on it. The second one to listen gets OSError."""
    try:
        bound_socket.listen(BACKLOG)
    except OSError as error:
        host, port = bound_socket.getsockname()[:2]
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: Exception) -> OSError:
    return OSError(f"host {host}, port {port} cannot be used: {error}")
