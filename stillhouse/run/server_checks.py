"""Asks the servers of a configuration whether they are there. A command does this before it imports torch, so that a
wrong address is reported within seconds. A server that answers that it is busy or still loading passes: a run waits
for it. A run also waits for a server that does not listen yet, because a job may start both at the same time.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

from stillhouse.config import ConfigError, EvalPromptsConfig, RolloutConfig, RunConfig
from stillhouse.config.reward_sum import reward_parts
from stillhouse.config.servers import ServerKind, server_kinds, server_token

#: the time limit in seconds for the answers of all servers, which are asked at the same time
SECONDS = 5.0
#: the additional seconds for the import of the client's libraries on a busy machine
IMPORT_SECONDS = 2.0


class _Server(NamedTuple):
    """A server of a configuration. key: the key with its address. check: raises ValueError unless the expected
    server answers within the given number of seconds.
    """

    key: str
    url: str
    check: Callable[[float], None]


def server_mistakes(config: RunConfig, *, must_listen: bool) -> list[ConfigError]:
    """Return an error for each server that has no host, does not answer in time, or is another one than expected.

    must_listen: whether a server whose host refuses the connection is an error, too.

    Only rank 0 asks, because an address may be reachable only from its machine.
    """
    if os.environ.get("RANK", "0") != "0":
        return []
    end = time.monotonic() + SECONDS
    # several sources of prompts can have the same reward
    servers = {(server.key, server.url): server for server in _servers(config)}
    silent = f"has not answered within {SECONDS:g} seconds: correct the address, or start the server first"
    problems = {(key, url): f"got {url}, which {silent}" for key, url in servers}
    threads = [
        Thread(target=_ask, args=(server, end, problems, must_listen), daemon=True) for server in servers.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + IMPORT_SECONDS - time.monotonic()))  # finding a host has no limit of its own
    return [ConfigError(key, problem) for (key, _), problem in dict(problems).items() if problem]


def _servers(config: RunConfig) -> Iterator[_Server]:
    for section, teacher in config.teacher_sections.items():
        for url in teacher.urls:
            yield _Server(f"{section}.url", url, partial(teacher.source_kind.require_server, section, teacher, url))
    if config.rollout is not None:
        for url in config.rollout.urls:
            kind, variable = server_kinds()[config.rollout.engine], config.rollout.token_variable
            yield _Server("rollout.url", url, partial(_require_engine, kind, url, variable))
    for number, rollout in enumerate(config.rollouts):
        yield from _reward_servers(config.rollout_key(number, "reward"), rollout)
    if config.eval.prompts is not None:
        yield from _reward_servers("eval.prompts.reward", config.eval.prompts)


def _reward_servers(key: str, section: RolloutConfig | EvalPromptsConfig) -> Iterator[_Server]:
    for part in reward_parts(section.reward):
        if part.is_server:
            variable = (section.reward_tokens or {}).get(part.server)
            yield _Server(key, part.name, partial(_require_reward, part.server_kind, part.name, key, variable))


def _require_engine(kind: ServerKind, url: str, variable: str | None, seconds: float) -> None:
    kind.require_server(url, server_token("rollout.token_variable", variable), seconds)


def _require_reward(kind: ServerKind, url: str, key: str, variable: str | None, seconds: float) -> None:
    token = None if variable is None else server_token(f"{key}_tokens", variable)
    kind.require_reward_server(url, token, seconds)


def _ask(server: _Server, end: float, problems: dict[tuple[str, str], str], must_listen: bool) -> None:
    """Replace the server's problem by the present one, or by "". end: the time until which the server must answer."""
    try:
        if _is_listening(server.url, end, must_listen):
            server.check(max(0.1, end - time.monotonic()))
    except ValueError as error:
        problems[server.key, server.url] = str(error)
    else:
        problems[server.key, server.url] = ""


def _is_listening(url: str, end: float, must_listen: bool) -> bool:
    """Return whether something accepts connections at `url`. Raises ValueError if the host cannot be reached, or
    if it refuses the connection although it must accept it.
    """
    address = urlsplit(url)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        seconds = max(0.1, end - time.monotonic())
        socket.create_connection((address.hostname or "", port), timeout=seconds).close()
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) and not must_listen:
            return False
        raise ValueError(
            f"got {url}, where no server can be reached now ({error.strerror or error}): start it first, or correct "
            "the address; a server that loads its model must already answer with 503, as `stillhouse serve` does"
        ) from error
    return True
