"""Asks a server whether it is of the expected kind. Needs no torch, so that a wrong address is reported at once.

A server that is busy or that loads its model passes, because a run waits for such a server.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from stillhouse.config.servers import ServerError
from stillhouse.display import enumerated
from stillhouse.serving.client.http_client import BUSY, HttpAnswer, NoAnswerError
from stillhouse.serving.client.pool import ServerPool

if TYPE_CHECKING:
    from stillhouse.serving.client.server_kinds import HttpServer


def require_kind(url: str, kinds: "Sequence[HttpServer]", token: str | None, seconds: float) -> None:
    """Raise ValueError unless the server at `url` is of one of these kinds, or answers that it is not ready yet.

    token: the server's bearer token. seconds: the time limit of all requests together.
    """
    answers = list[HttpAnswer]()
    end = time.monotonic() + seconds
    with closing(ServerPool([url], 4 * seconds, token=token)) as pool:
        for kind in kinds:
            if not kind.description_path:
                return
            answer = _answer(pool, url, kind.description_path, end - time.monotonic())
            if answer.status in BUSY or kind.is_described_by(answer.status, answer.text, is_only=len(kinds) == 1):
                return
            if answer.status in (401, 403):
                raise ValueError(f"got {url}, which answers {answer.status}: check the bearer token (token_variable)")
            answers.append(answer)
    shown = "; ".join(f"{answer.path}: {answer.status} {answer.message[:60]!r}" for answer in answers)
    expected = enumerated([kind.title for kind in kinds], "or")
    raise ValueError(f"got {url}, whose answers are not those of {expected} ({shown}): correct the address")


def require_http(url: str, path: str, token: str | None, seconds: float) -> None:
    """Raise ValueError unless the server answers a GET request in time. Its status and content are not compared."""
    with closing(ServerPool([url], 4 * seconds, token=token)) as pool:
        _answer(pool, url, path, seconds)


def _answer(pool: ServerPool, url: str, path: str, seconds: float) -> HttpAnswer:
    try:
        return pool.get_once(url, path, seconds)
    except (NoAnswerError, ServerError) as error:
        raise ValueError(
            f"got {url}, which accepts connections but does not answer {path} as an HTTP server does ({error}): "
            "correct the address"
        ) from error
