"""Sends requests to the servers of one model: bounded, balanced by tokens, repeated until one of them answers.

If a server cannot answer a request, the request is sent to another server. A server that fails gets no request for a
while, longer after every failure. No request is skipped: it ends with its answer, or with an error.
"""

import asyncio
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx2

from stillhouse.display import first_line

T = TypeVar("T")
#: one answer of one server to a path, whatever its status. A body is posted as JSON; None is a GET
Ask = Callable[[str, Any], httpx2.Response]

#: the environment variable with the servers' bearer token
TOKEN_VARIABLE = "STILLHOUSE_TOKEN"
#: requests that a server has at a time; engines batch them
IN_FLIGHT = 16
#: seconds for which a failing server is left alone: at first, and at most
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
#: a request ends with an error after this many unusable answers of every server
MAX_BAD_ANSWERS = 5
#: seconds without an answer before a line is printed about the wait
QUIET_SECONDS = 2.0
#: answers that another attempt may change: the server is overloaded, restarting, or has lost its own backend
_BUSY, _BROKEN = frozenset({408, 425, 429, 502, 503, 504}), 500
_GIVEN_UP = "the request was given up, because the run ends"


class ServerError(OSError):
    """No server has answered for too long, or the servers' answers are damaged again and again."""


class UnreachableError(ServerError):
    """One server has not answered at all."""


class RefusedError(ValueError):
    """A server has answered that the request is wrong, so that no repetition can help."""


class AskAgainError(ValueError):
    """`Call.parse` raises this for an answer that is complete but cannot be used: the request is sent again, and the
    server counts as working.
    """


class _TryAgainError(Exception):
    """An attempt has failed. fault: "damaged" if the answer cannot be used, "broken" if the server could not process
    the request. pause: the seconds that a busy server asks for.
    """

    def __init__(self, message: str, fault: str = "", pause: float | None = None):
        super().__init__(message)
        self.fault, self.pause = fault, pause


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request. parse: turns an answer into a result; raises ValueError for a damaged answer. tokens: its size.

    content: the body, or a function that makes it from the server's URL for each attempt; it must return at once.
    absent: what to do if the server does not know the path. statuses: of answers that `parse` reads.
    """

    path: str
    content: bytes | Callable[[str], bytes]
    content_type: str
    parse: Callable[[httpx2.Response], T]
    tokens: int
    absent: str = ""
    statuses: frozenset[int] = frozenset({200})


@dataclass
class Server:
    """held: whether it gets no requests. error: the reason why it is given up; None if it is not given up."""

    url: str
    calls: int = 0
    tokens: int = 0
    failures: int = 0
    paused_until: float = 0.0
    last_answer: float = 0.0
    warned: bool = False
    held: bool = False
    error: ServerError | None = None

    def pause(self, seconds: float | None) -> None:
        """Leave the server alone for a while: as long as it has asked for, or twice as long after every failure."""
        now = time.monotonic()
        if now < self.paused_until:  # another request has found the same failure
            return
        if seconds is None:
            seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures, 20))
            self.failures += 1
        self.paused_until = now + max(FIRST_PAUSE, seconds) * random.uniform(1.0, 1.5)

    def hold(self, error: ServerError | None = None) -> None:
        """Send the server no more requests until `release`; those that it has already go on.

        error: the server is given up. If all servers are, requests raise the error.
        """
        self.held, self.error = True, error

    def release(self) -> None:
        self.held, self.error = False, None


class ServerPool:
    """The servers of one model.

    timeout: seconds without an answer of any server after which requests fail.
    warn: prints a line when a server fails or comes back. model: the name of the servers' model, for messages.
    answer_seconds: the limit for one answer; None: a quarter of the timeout. in_flight: the most requests of a
        server.

    All methods may be called from several threads. `close` ends requests that are under way.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        warn: Callable[[str], None] = lambda line: None,
        *,
        model: str = "teacher",
        answer_seconds: float | None = None,
        in_flight: int = IN_FLIGHT,
    ):
        self._model, self._in_flight = model, in_flight
        answer_seconds = timeout / 4 if answer_seconds is None else answer_seconds
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.timeout, self._warn = timeout, warn
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._closed = False
        #: servers that have failed and answer again, until `take_returned`
        self._returned: set[str] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"{model} client", daemon=True).start()
        self._client = httpx2.AsyncClient(
            # no compression: the size of a body is then the size in memory
            headers=headers | {"Accept-Encoding": "identity"},
            timeout=httpx2.Timeout(answer_seconds, connect=min(10.0, timeout / 4)),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    def score(self, calls: Sequence[Call[T]], url: str | None = None, timeout: float | None = None) -> list[T]:
        """The results of several requests, in their order.

        url: send them only to this server. timeout: seconds, in place of the pool's own.

        Raises ServerError if the servers cannot answer, RefusedError if one of them refuses a request.
        """
        servers = [server for server in self.servers if url in (None, server.url)]
        return self._wait(lambda: self._all(calls, servers, self.timeout if timeout is None else timeout))

    def submit(self, call: Call[T]) -> Future[T]:
        """Send a request; returns at once. The future raises what `score` would raise."""
        return self._start(lambda: self._answered(call, self.servers, self.timeout))

    def asker(self, url: str, patience: float | None = None) -> Ask:
        """Asks one server for one answer. A request that fails is not repeated, but a server that is just starting
        has time to accept connections.

        patience: the seconds for that, in place of the timeout. Raises UnreachableError after that time.
        """
        root, seconds = url.rstrip("/"), self.timeout if patience is None else patience
        return lambda path, body: self._wait(lambda: self._ask(f"{root}{path}", body, seconds))

    def take_returned(self) -> list[str]:
        """The URLs of servers that had failed and have answered again since the last call."""
        returned, self._returned = self._returned, set()
        return sorted(returned)

    def is_failing(self, url: str) -> bool:
        return any(server.warned for server in self.servers if server.url == url)

    def close(self) -> None:
        """End requests that are under way; later ones raise ServerError."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
            # a request that another thread has just begun still finds a loop, and ends with an error
            self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, self._loop.stop)

    def _start(self, answer: Callable[[], Awaitable[T]]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(self._until_closed(answer), self._loop)

    def _wait(self, answer: Callable[[], Awaitable[T]]) -> T:
        try:
            return self._start(answer).result()
        except CancelledError as error:
            raise ServerError(_GIVEN_UP) from error

    async def _until_closed(self, answer: Callable[[], Awaitable[T]]) -> T:
        if self._closed:
            raise ServerError(_GIVEN_UP)
        try:
            return await answer()
        except asyncio.CancelledError as error:
            raise ServerError(_GIVEN_UP) from error

    async def _cancel(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    async def _all(self, calls: Sequence[Call[T]], servers: Sequence[Server], timeout: float) -> list[T]:
        tasks = [asyncio.create_task(self._answered(call, servers, timeout)) for call in calls]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, url: str, body: Any, patience: float) -> httpx2.Response:
        started, announced = time.monotonic(), False
        while True:
            try:
                response = await self._client.request("GET" if body is None else "POST", url, json=body)
                if response.status_code not in _BUSY:
                    return response
                problem = f"{response.status_code} {_message(response)}"
            except httpx2.InvalidURL as error:
                raise ValueError(f"{url} is no address: {error}") from error
            except httpx2.HTTPError as error:
                problem = first_line(error)
            waited = time.monotonic() - started
            if waited > patience:
                raise UnreachableError(f"{url} has not answered for {patience:g} seconds ({problem})")
            if waited > QUIET_SECONDS and not announced:
                self._warn(f"waiting up to {patience:g} seconds for {url} ({problem})")
                announced = True
            await asyncio.sleep(min(1.0, patience / 10))

    async def _answered(self, call: Call[T], servers: Sequence[Server], timeout: float) -> T:
        """The result of a request, from whichever server gives it."""
        started = 0.0
        faults = Counter[tuple[str, str]]()
        while True:
            server = await _free_server(servers, self._in_flight)
            started = started or time.monotonic()
            server.calls, server.tokens = server.calls + 1, server.tokens + call.tokens
            try:
                result = await self._attempt(server, call)
            except AskAgainError:
                server.last_answer = time.monotonic()
                continue
            except _TryAgainError as error:
                problem = error
            else:
                server.last_answer = time.monotonic()
                self._announce(server, "")
                server.failures = 0
                return result
            finally:
                server.calls, server.tokens = server.calls - 1, server.tokens - call.tokens
            server.pause(problem.pause)
            if problem.pause is None:
                self._announce(server, str(problem))
            faults[server.url, problem.fault] += 1
            fewest = {fault: min(faults[other.url, fault] for other in servers) for fault in ("damaged", "broken")}
            if fewest["damaged"] >= MAX_BAD_ANSWERS:
                count = faults[server.url, "damaged"]
                raise ServerError(f"{server.url}: {count} answers could not be used; the last one: {problem}")
            if fewest["broken"] >= MAX_BAD_ANSWERS and time.monotonic() - started > timeout:
                raise ServerError(f"no server can process a request; {server.url}: {problem}")
            if time.monotonic() - max(started, *(other.last_answer for other in servers)) > timeout:
                raise ServerError(
                    f"no server of the {self._model} has answered for {timeout:g} seconds; {server.url}: {problem}"
                )

    async def _attempt(self, server: Server, call: Call[T]) -> T:
        try:
            content = call.content if isinstance(call.content, bytes) else call.content(server.url)
            response = await self._client.post(
                server.url + call.path, content=content, headers={"Content-Type": call.content_type}
            )
        except httpx2.HTTPError as error:
            raise _TryAgainError(first_line(error)) from error
        status = response.status_code
        if status in _BUSY:
            raise _TryAgainError(f"{status} {_message(response)}", pause=_seconds(response))
        if status == _BROKEN:
            raise _TryAgainError(f"{status} {_message(response)}", "broken")
        if status not in call.statuses:
            hint = f"; {call.absent}" if status == 404 and call.absent else ""
            raise RefusedError(f"{server.url}{call.path}: {status} {_message(response)}{hint}")
        try:
            return await asyncio.to_thread(call.parse, response)
        except (RefusedError, AskAgainError):
            raise
        except ValueError as error:
            raise _TryAgainError(str(error), "damaged") from error

    def _announce(self, server: Server, problem: str) -> None:
        """Warn once when a server fails (`problem`), and once when it answers again ("")."""
        if problem and not server.warned:
            self._warn(f"the {self._model}'s server {server.url} fails, and is asked again: {problem}")
        elif not problem and server.warned:
            self._warn(f"the {self._model}'s server {server.url} answers again")
            self._returned.add(server.url)
        server.warned = bool(problem)


async def _free_server(servers: Sequence[Server], in_flight: int) -> Server:
    """The server with the fewest outstanding tokens, of those that have not failed and are not full.

    Of several such servers, the one that has not answered for the longest time. Raises ServerError if all servers are
    given up.
    """
    while True:
        now = time.monotonic()
        if all(server.error for server in servers):
            raise ServerError(str(servers[0].error)) from servers[0].error
        free = [
            server
            for server in servers
            if server.calls < in_flight and server.paused_until <= now and not server.held
        ]
        if free:
            return min(free, key=lambda server: (server.tokens, server.last_answer))
        waits = [server.paused_until - now for server in servers if server.paused_until > now]
        await asyncio.sleep(min([0.02, *waits]))


def _message(response: httpx2.Response) -> str:
    """The server's own words, from an error in OpenAI's form or from any text."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text
    return str(message).strip()[:500]


def _seconds(response: httpx2.Response) -> float | None:
    """The seconds of the Retry-After header, at most a minute. Without it, 0 for a busy server (429), else None."""
    text = response.headers.get("retry-after", "")
    if text.isdecimal():
        return min(60.0, float(text))
    return 0.0 if response.status_code == 429 else None
