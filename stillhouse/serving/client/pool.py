"""Sends requests to the servers of one model. Each server gets at most `in_flight` requests at a time.

If a server cannot answer a request, the request is sent to another server. After a failure, a server gets no requests
for a pause, which grows with every failure. Every request ends with an answer or with an error: each attempt and the
whole wait have time limits. A server cannot extend these limits by slow bytes, informational answers or Retry-After.
"""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stillhouse.config.servers import ServerError
from stillhouse.display import first_line
from stillhouse.serving import JSON, SAFETENSORS
from stillhouse.serving.client.http_client import BUSY, MOST_BYTES, HttpAnswer, HttpClient, NoAnswerError

T = TypeVar("T")
#: sends a request with a path and a body to one server, and returns the answer, even if its status is an error. The
#: body is posted as JSON; bytes are posted as a safetensors body. If the body is None, a GET request is sent
Ask = Callable[[str, Any], HttpAnswer]

#: the maximum number of requests that one server gets at a time; engines batch them
IN_FLIGHT = 16
#: the length of a server's pause after its first failure, and of the longest pause, in seconds
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
#: a request ends with an error after this many damaged answers from each server
MAX_BAD_ANSWERS = 5
#: seconds without an answer before a line is printed about the wait
QUIET_SECONDS = 2.0
#: the status after which a request is repeated, although the server could not process it
_BROKEN = 500
_GIVEN_UP = "the request was given up, because the run ends"


class UnreachableError(ServerError):
    """A server has not answered a request in time."""


class RefusedError(ValueError):
    """A server has answered that the request is invalid, so the request is not repeated."""


class AskAgainError(ValueError):
    """Raised by `ServerRequest.parse` for an unusable answer: the request is repeated, the server has not failed."""


class _TryAgainError(Exception):
    """An attempt has failed.

    fault: "damaged" if the answer cannot be used, "broken" if the server could not process the request, otherwise "".
    pause: the seconds for which a busy server wants no requests.
    """

    def __init__(self, message: str, fault: str = "", pause: float | None = None):
        super().__init__(message)
        self.fault, self.pause = fault, pause


@dataclass(frozen=True)
class ServerRequest(Generic[T]):
    """One request.

    content: the body, or a function that returns the body for a server's URL. The function is called for each
    attempt, in another thread if `is_slow`.
    parse: turns an answer into a result; raises ValueError for a damaged answer.
    statuses: the statuses of answers that `parse` reads.
    tokens: the number of tokens; the pool prefers the server with the fewest tokens in progress.
    most_bytes: the maximum number of bytes of an answer.
    absent: advice for the user if the server does not know the path (404).
    """

    path: str
    content: bytes | Callable[[str], bytes]
    content_type: str
    parse: Callable[[HttpAnswer], T]
    tokens: int
    most_bytes: int
    absent: str = ""
    statuses: frozenset[int] = frozenset({200})
    is_slow: bool = False


@dataclass
class Server:
    """A server and its state.

    calls, tokens: the number of requests in progress, and of their tokens.
    held: whether the server gets no requests. error: the reason if the server is given up.
    limits: for each request in progress, its time limit and the later time to which the limit is extended when the
    server answers another request.
    is_failing: whether the server has failed and has not answered since then.
    """

    url: str
    calls: int = 0
    tokens: int = 0
    failures: int = 0
    paused_until: float = 0.0
    last_answer: float = 0.0
    is_failing: bool = False
    held: bool = False
    error: ServerError | None = None
    limits: dict[asyncio.Timeout, float] = field(default_factory=dict)

    def pause(self, seconds: float | None) -> None:
        """Send no requests for this number of seconds. None: for a time that doubles after every failure."""
        now = time.monotonic()
        if now < self.paused_until:  # another request has reported the same failure
            return
        if seconds is None:
            seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures, 20))
            self.failures += 1
        self.paused_until = now + max(FIRST_PAUSE, seconds) * random.uniform(1.0, 1.5)

    def record_answer(self) -> None:
        """Extend the time limits of the other requests in progress, because the server works."""
        self.last_answer = time.monotonic()
        for limit, end in self.limits.items():
            if not limit.expired():
                limit.reschedule(end)

    def hold(self, error: ServerError | None = None) -> None:
        """Send the server no more requests until `release`.

        error: the reason if the server is given up. If all servers are given up, requests raise this error.
        """
        self.held, self.error = True, error

    def release(self) -> None:
        """Send requests to the server again."""
        self.held, self.error, self.last_answer = False, None, time.monotonic()


class ServerPool:
    """The servers of one model. All methods may be called from several threads.

    timeout: requests fail if no server has answered for this number of seconds.
    warn: prints a line when a server fails, or answers again after a failure. token: the servers' bearer token.
    model, key: for messages, the name of the servers' model, and the key of the configuration with the timeout.
    answer_seconds: the limit for one answer, from the connection to the end of parsing. If it is None, the limit is a
    quarter of the timeout. in_flight: the maximum number of requests that one server gets at a time.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float,
        warn: Callable[[str], None] = lambda line: None,
        *,
        model: str = "teacher",
        key: str = "teacher.timeout",
        token: str | None = None,
        answer_seconds: float | None = None,
        in_flight: int = IN_FLIGHT,
    ):
        self._model, self._key, self._in_flight = model, key, in_flight
        self._answer_seconds = timeout / 4 if answer_seconds is None else answer_seconds
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.timeout, self._warn = timeout, warn
        self._client = HttpClient(token, self._answer_seconds, connect_seconds=min(10.0, timeout / 4))
        self._closed = False
        #: the URLs of servers that have answered again after a failure; the owner of the pool may remove URLs
        self.returned: set[str] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"{model} client", daemon=True).start()

    def score(
        self, calls: Sequence[ServerRequest[T]], url: str | None = None, timeout: float | None = None
    ) -> list[T]:
        """Return the results of several requests, in the order of the requests.

        url: the only server that gets the requests. timeout: replaces the pool's timeout.
        Raises ServerError if no server answers, and RefusedError if a server refuses a request.
        """
        servers = [server for server in self.servers if url in (None, server.url)]
        seconds = self.timeout if timeout is None else timeout

        async def results() -> list[T]:
            tasks = [asyncio.create_task(self._answered(call, servers, seconds)) for call in calls]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        return self._wait(results)

    def submit(self, call: ServerRequest[T]) -> Future[T]:
        """Send a request, and return at once. The future raises the same errors as `score`."""
        return self._start(lambda: self._answered(call, self.servers, self.timeout))

    def asker(self, url: str, patience: float | None = None, most_bytes: int = MOST_BYTES) -> Ask:
        """Return a function that sends requests to one server, and repeats them while the server starts or is busy.

        patience: the seconds after which the function raises UnreachableError; None: the pool's timeout.
        most_bytes: the maximum number of bytes of an answer.
        """
        root, seconds = url.rstrip("/"), self.timeout if patience is None else patience
        return lambda path, body: self._wait(lambda: self._ask(root, path, body, seconds, most_bytes))

    def get_once(self, url: str, path: str, seconds: float) -> HttpAnswer:
        """Send one GET request. Raises NoAnswerError without an answer in time, ServerError for an unusable one."""
        return self._wait(lambda: self._one_answer(url, path, None, JSON, seconds))

    def close(self) -> None:
        """End the requests in progress; later requests raise ServerError."""

        async def cancel() -> None:
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()
            # the loop runs for one more second, so that a request that has just begun in another thread gets an error
            self._loop.call_soon_threadsafe(self._loop.call_later, 1.0, self._loop.stop)

    def _start(self, answer: Callable[[], Awaitable[T]]) -> Future[T]:
        async def until_closed() -> T:
            if self._closed:
                raise ServerError(_GIVEN_UP)
            try:
                return await answer()
            except asyncio.CancelledError as error:
                raise ServerError(_GIVEN_UP) from error

        return asyncio.run_coroutine_threadsafe(until_closed(), self._loop)

    def _wait(self, answer: Callable[[], Awaitable[T]]) -> T:
        if self._closed:  # the loop may have stopped already
            raise ServerError(_GIVEN_UP)
        try:
            return self._start(answer).result()
        except CancelledError as error:
            raise ServerError(_GIVEN_UP) from error

    async def _ask(self, server: str, path: str, body: Any, patience: float, most_bytes: int) -> HttpAnswer:
        started, announced, url, limit = time.monotonic(), False, server + path, max(patience, self.timeout)
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = SAFETENSORS if isinstance(body, bytes) else JSON
        while True:
            try:
                left = started + limit - time.monotonic()
                answer = await self._one_answer(server, path, content, kind, left, most_bytes)
                if answer.status not in BUSY:
                    return answer
                problem = f"{answer.status} {answer.message}"
            except NoAnswerError as error:
                problem = str(error)
            waited = time.monotonic() - started
            if waited > patience:
                raise UnreachableError(f"{url} has not answered for {patience:g} seconds ({problem})")
            if waited > QUIET_SECONDS and not announced:
                self._warn(f"waiting up to {patience:g} seconds for {url} ({problem})")
                announced = True
            await asyncio.sleep(min(1.0, patience / 10))

    async def _one_answer(
        self, server: str, path: str, content: bytes | None, kind: str, seconds: float, most_bytes: int = MOST_BYTES
    ) -> HttpAnswer:
        try:
            async with asyncio.timeout(max(FIRST_PAUSE, seconds)):
                return await self._client.send(server, path, content, kind, most_bytes)
        except TimeoutError as error:
            raise NoAnswerError("its answer does not end") from error
        except ValueError as error:
            raise ServerError(f"{server}{path}: {error}") from error

    async def _answered(self, call: ServerRequest[T], servers: Sequence[Server], timeout: float) -> T:
        """Send a request to one server after another until a server answers, and return the result."""
        wait, tried = _Wait(servers, timeout), 0.0
        faults = Counter[tuple[str, str]]()
        while True:
            server = await self._free_server(wait)
            tried = tried or time.monotonic()
            server.calls, server.tokens = server.calls + 1, server.tokens + call.tokens
            try:
                seconds = min(self._answer_seconds, max(FIRST_PAUSE, wait.left))
                # if this server does not answer at all, half of the time remains for another server
                has_other = any(not (other.is_failing or other.held) for other in servers if other is not server)
                result = await self._attempt(server, call, seconds, max(FIRST_PAUSE, wait.left / (1 + has_other)))
            except AskAgainError:
                server.record_answer()
                continue
            except _TryAgainError as error:
                problem = error
            else:
                server.record_answer()
                self._announce(server, "")
                server.failures = 0
                return result
            finally:
                server.calls, server.tokens = server.calls - 1, server.tokens - call.tokens
            # the pause is at most half of the remaining time, so that one more attempt is possible
            server.pause(None if problem.pause is None else min(problem.pause, wait.left / 2))
            if problem.pause is None:
                self._announce(server, str(problem))
            wait.problem = f"{server.url}: {problem}"
            faults[server.url, problem.fault] += 1
            fewest = {fault: min(faults[other.url, fault] for other in servers) for fault in ("damaged", "broken")}
            if fewest["damaged"] >= MAX_BAD_ANSWERS:
                count = faults[server.url, "damaged"]
                raise ServerError(f"{server.url}: {count} answers could not be used; the last one: {problem}")
            if fewest["broken"] >= MAX_BAD_ANSWERS and time.monotonic() - tried > timeout:
                raise ServerError(f"no server can process a request; {wait.problem}")

    async def _free_server(self, wait: "_Wait") -> Server:
        """Wait until a server is neither paused, held nor full, and return it. If there are several such servers,
        return the server with the fewest tokens in progress; among equals, the server whose last answer is oldest.

        Raises ServerError if all servers are given up, or if none has answered in time.
        """
        while True:
            now, servers = time.monotonic(), wait.servers
            working = [server for server in servers if server.error is None]
            if not working:
                raise ServerError(str(servers[0].error)) from servers[0].error
            # no limit applies here while weights are loaded on all servers: train.timeout limits the loading
            if wait.left < 0 and not all(server.held for server in working):
                silent = f"no server of the {self._model} has answered for {wait.seconds:g} seconds"
                raise ServerError(f"{silent} ({self._key}); {wait.problem}")
            free = [
                server
                for server in working
                if server.calls < self._in_flight and server.paused_until <= now and not server.held
            ]
            if free:
                return min(free, key=lambda server: (server.tokens, server.last_answer))
            waits = [server.paused_until - now for server in servers if server.paused_until > now]
            await asyncio.sleep(min([0.02, *waits]))

    async def _attempt(self, server: Server, call: ServerRequest[T], seconds: float, silent_seconds: float) -> T:
        """Send a request to one server once, and return the parsed answer.

        seconds: the time limit. silent_seconds: the time limit if the server answers no other request meanwhile.
        """
        content = call.content
        if not isinstance(content, bytes):
            content = await asyncio.to_thread(content, server.url) if call.is_slow else content(server.url)
        started = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(started + min(seconds, silent_seconds))
        server.limits[limit] = started + seconds
        try:
            async with limit:
                answer = await self._client.send(server.url, call.path, content, call.content_type, call.most_bytes)
                if answer.status in call.statuses:
                    return await asyncio.to_thread(call.parse, answer)
        except TimeoutError as error:
            waited = asyncio.get_running_loop().time() - started
            raise _TryAgainError(f"no whole answer within {waited:.3g} seconds") from error
        except NoAnswerError as error:
            raise _TryAgainError(str(error)) from error
        except (RefusedError, AskAgainError):
            raise
        except ValueError as error:
            raise _TryAgainError(first_line(error), "damaged") from error
        finally:
            del server.limits[limit]
        problem = f"{answer.status} {answer.message}"
        if answer.status in BUSY:
            text = answer.headers.get("retry-after", "")
            pause = min(60.0, float(text)) if text.isdecimal() else 0.0 if answer.status == 429 else None
            raise _TryAgainError(problem, pause=pause)
        if answer.status == _BROKEN:
            raise _TryAgainError(problem, "broken")
        hint = f"; {call.absent}" if answer.status == 404 and call.absent else ""
        raise RefusedError(f"{answer.url}: {problem}{hint}")

    def _announce(self, server: Server, problem: str) -> None:
        """Warn once when a server fails, and once when it answers again. problem: the failure; "" for an answer."""
        if problem and not server.is_failing:
            self._warn(f"the {self._model}'s server {server.url} fails, and is asked again: {problem}")
        elif not problem and server.is_failing:
            self._warn(f"the {self._model}'s server {server.url} answers again")
            self.returned.add(server.url)
        server.is_failing = bool(problem)


class _Wait:
    """The time for which a request has waited. problem: the server and the problem of the last attempt."""

    def __init__(self, servers: Sequence[Server], seconds: float):
        self.servers, self.seconds, self._started = servers, seconds, time.monotonic()
        self.problem = f"{', '.join(server.url for server in servers)}: busy with other requests"

    @property
    def left(self) -> float:
        """The remaining seconds until the request fails because no server has answered."""
        last = max(self._started, *(server.last_answer for server in self.servers))
        return last + self.seconds - time.monotonic()
