"""Sends one request to a server, which may be broken or hostile, and reads its answer.

The number of bytes of an answer is limited. A charset in its headers is ignored, and a compressed answer is refused.
Invalid content raises a ValueError, and text for messages has no control characters. An answer may repeat the bearer
token of the request, so the token is replaced in everything that the server sends.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from stillhouse.display import escaped, first_line

Parsed = TypeVar("Parsed", bound=BaseModel)

#: statuses after which a request is repeated: the server is overloaded, starts, or has lost its backend
BUSY = frozenset({408, 425, 429, 502, 503, 504})
#: the maximum number of bytes of an answer that describes the server
MOST_BYTES = 16 * 2**20
#: a log-probability in JSON. NaN and +∞ are refused, but not −∞; because of rounding, a value may be slightly above 0
LogProb = Annotated[float, Field(le=1e-3)]
#: a size in a server's description, such as the number of rows of the head
Size = Annotated[int, Field(ge=1, lt=2**31)]
#: the maximum number of characters that a message quotes from an answer, and from one value of an answer
_SHOWN, _SHOWN_VALUE = 500, 100
#: shorter bearer tokens are not replaced in answers, because an answer may contain the same characters by chance
_LEAST_TOKEN = 8


class NoAnswerError(Exception):
    """A server cannot be reached, or its answer is not valid HTTP or ends too early."""


@dataclass(frozen=True)
class HttpAnswer:
    """A complete answer. server: the address of the server. path: the path of the request."""

    status: int
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    path: str = ""

    @property
    def url(self) -> str:
        return self.server + self.path

    @property
    def text(self) -> str:
        """The body as UTF-8, whatever charset the headers name. Unlike `message`, it may have control characters."""
        return self.content.decode(errors="replace")

    @property
    def message(self) -> str:
        """The message of an error in OpenAI's format, or the beginning of any other body, on one line."""
        try:
            message = from_json(self.content)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = None
        text = message if isinstance(message, str) else self.content[: 4 * _SHOWN].decode(errors="replace")
        return escaped(text.strip())[:_SHOWN]

    def json(self) -> Any:
        """Parse the body. Raises ValueError unless it is JSON with at most 200 levels and 4,300 digits per number."""
        try:
            return from_json(self.content)
        except ValueError as error:
            raise ValueError(f"{self.url} does not answer with JSON: {error}") from error


class HttpClient:
    """Sends requests to servers. token: the bearer token.

    seconds: the time limit for each read or write. connect_seconds: the time limit for a connection.
    """

    def __init__(self, token: str | None, seconds: float, connect_seconds: float):
        self._token = token if token is not None and len(token) >= _LEAST_TOKEN else None
        # without compression, the size of a body is its size in memory
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "stillhouse"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._limits = httpx2.Timeout(seconds, connect=connect_seconds).as_dict()
        # not an `httpx2.AsyncClient`, which would keep cookies, decode bodies by their headers, and log addresses
        self._transport = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=None), trust_env=False)

    async def send(
        self, server: str, path: str, content: bytes | None, content_type: str, most_bytes: int
    ) -> HttpAnswer:
        """Post `content`, or send a GET request if `content` is None. Redirects are not followed, so that no other
        server gets the token.

        Raises NoAnswerError for an incomplete answer, and ValueError for an answer that is too long or encoded.
        """
        method, headers = "GET" if content is None else "POST", self._headers | {"Content-Type": content_type}
        extensions = {"timeout": self._limits}
        try:
            request = httpx2.Request(method, server + path, headers=headers, content=content, extensions=extensions)
            response = await self._transport.handle_async_request(request)
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            try:
                encoding = response.headers.get("content-encoding", "identity")
                if encoding != "identity":
                    raise ValueError(
                        f"an answer with the encoding {self._hidden(encoding)[:40]!r}: expected identity"
                    )
                content_read = bytearray()
                async for part in response.stream:
                    content_read += part
                    if len(content_read) > most_bytes:
                        raise ValueError(f"an answer of more than {most_bytes:,} bytes")
            finally:
                await response.stream.aclose()
        except httpx2.InvalidURL as error:
            raise ValueError(f"{server}{path} is not a valid URL: {error}") from error
        except httpx2.HTTPError as error:
            raise NoAnswerError(self._hidden(first_line(error))) from error
        answer_headers = {name: self._hidden(value) for name, value in response.headers.items()}
        body = bytes(content_read)
        if self._token is not None:
            body = body.replace(self._token.encode(), b"*" * len(self._token))
        return HttpAnswer(response.status_code, body, answer_headers, server, path)

    async def close(self) -> None:
        await self._transport.aclose()

    def _hidden(self, text: str) -> str:
        return text if self._token is None else text.replace(self._token, "*" * len(self._token))


def bytes_of_json(values: int, per_value: int = 512) -> int:
    """Return the size limit of a JSON answer. values: the number of values, each with at most `per_value` bytes."""
    return 2**20 + per_value * values


def parsed(kind: type[Parsed], content: str | bytes, what: str, hint: str = "") -> Parsed:
    """Parse JSON as `kind`. Raises ValueError with `what`, the first problem and `hint` in one line."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        value = first["input"][:_SHOWN_VALUE] if isinstance(first["input"], bytes | str) else first["input"]
        place = escaped(".".join(map(str, first["loc"])))[:_SHOWN_VALUE]
        problem = f"{escaped(first['msg'])}, got {escaped(reprlib.repr(value))}"
        raise ValueError(": ".join(filter(None, [what, place, problem])) + (f"; {hint}" if hint else "")) from error
