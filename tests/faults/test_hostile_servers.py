"""Servers that drip, nest and lie: each ends a request within its limit, by an error that names the server."""

import base64
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from kit import slow
from kit.config_cases import refused_calls
from kit.engine_answers import INFO, METADATA, true_answers
from kit.runs import wait_for
from kit.stub_servers import HOSTILE, Fault, body, hostile_server, raw

from stillhouse import __version__
from stillhouse.config.servers import ServerError
from stillhouse.display import escaped
from stillhouse.serving import JSON
from stillhouse.serving.client import pool
from stillhouse.serving.client.http_client import HttpAnswer
from stillhouse.serving.client.pool import ServerPool, ServerRequest
from stillhouse.serving.client.reward_server import RewardServer
from stillhouse.serving.client.server_api import ServerInfo
from stillhouse.serving.client.stillhouse import StillhouseApi
from stillhouse.serving.client.vllm import VllmApi
from stillhouse.serving.wire import WIRE_FORMAT
from stillhouse.signals.signal_spec import DocumentRows, SignalSpec

#: seconds of a pool's timeout, and the most until a request ends: this machine may be busy with other tests
TIMEOUT, MOST_SECONDS = 1.0, 15.0
DOCUMENT = DocumentRows(np.arange(5), range(4))
REQUEST = ServerRequest("/", b"", JSON, lambda answer: answer.server, tokens=1, most_bytes=100)


def reward(url: str) -> Any:
    with closing(RewardServer(f"{url}/reward", f"rollout.reward: {url}", TIMEOUT, lambda line: None)) as server:
        return server.request("rollout.reward", "", "2 + 2 =", " 5", {"a": 1}, "train.jsonl:3", []).result(60)


def calls_to(url: str) -> list[Any]:
    return list(StillhouseApi().calls(ServerInfo(url, "t"), SignalSpec("hidden", "float32"), 8, [DOCUMENT]))


def asking(question: Callable[[ServerPool, str], Any]) -> Callable[[str], Any]:
    def request(url: str) -> Any:
        with closing(ServerPool([url], TIMEOUT)) as servers:
            return question(servers, url)

    return request


TOP_K = SignalSpec("top_k", "float32", 2, 1.0)
REQUESTS = [
    pytest.param(reward, id="reward"),
    pytest.param(asking(lambda servers, url: StillhouseApi().describe(servers.asker(url), url)), id="describe"),
    slow(asking(lambda servers, url: VllmApi().model_name(servers.asker(url))), id="name the model"),
    slow(asking(lambda servers, url: servers.score(calls_to(url))), id="score"),
    slow(
        asking(lambda servers, url: servers.score(list(VllmApi().calls(ServerInfo(url, "t"), TOP_K, 0, [DOCUMENT])))),
        id="top_k",
    ),
]


@pytest.mark.parametrize("request_of", REQUESTS)
def test_no_answer_ends_a_request_otherwise_than_by_a_named_error(
    monkeypatch: pytest.MonkeyPatch, request_of: Callable[[str], Any]
) -> None:
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.01)

    def problem(fault: Fault) -> str:
        with hostile_server(fault) as (url, _):
            started = time.monotonic()
            try:
                return f"it returned {request_of(url)}"
            except (ValueError, ServerError) as error:
                text, seconds = str(error), time.monotonic() - started
                if type(error).__module__.partition(".")[0] not in ("stillhouse", "builtins"):
                    return f"{type(error)}: {error}"
                if isinstance(error, UnicodeError) or text != escaped(text) or len(text) > 2000 or url not in text:
                    return f"no message for a user: {text!r}"
                return "" if seconds < MOST_SECONDS else f"it took {seconds:.1f} seconds: {text}"
            except BaseException as error:  # noqa: BLE001  the test looks for any such exception
                return f"{type(error)}: {error}"

    with ThreadPoolExecutor(8) as threads:
        problems = dict(zip(HOSTILE, threads.map(problem, HOSTILE.values()), strict=True))
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_the_whole_wait_is_bounded_whatever_a_server_says() -> None:
    """Retry-After, a byte now and then, and the time in the queue behind a request that never ends."""
    busy = body(b"", status=503, more=b"Retry-After: 60\r\n")
    with hostile_server(busy) as (url, _), closing(ServerPool([url], TIMEOUT)) as servers:
        started = time.monotonic()
        with pytest.raises(ServerError, match=rf"for 1 seconds \(teacher\.timeout\); {url}: (503|no whole|Connect)"):
            servers.score(calls_to(url))
        assert time.monotonic() - started < MOST_SECONDS
    with (
        hostile_server(HOSTILE["drips"]) as (url, _),
        closing(ServerPool([url], TIMEOUT, in_flight=1, answer_seconds=TIMEOUT)) as servers,
    ):
        started = time.monotonic()
        for future in [servers.submit(call) for call in calls_to(url) * 20]:
            with pytest.raises(ServerError, match=rf"for 1 seconds \(teacher\.timeout\); {url}: "):
                future.result(60)
        assert time.monotonic() - started < MOST_SECONDS


def test_a_server_that_drips_leaves_time_for_another_one() -> None:
    with (
        hostile_server(HOSTILE["drips"]) as (url, _),
        hostile_server(body(b"{}")) as (other, _),
        closing(ServerPool([url, other], TIMEOUT, answer_seconds=TIMEOUT)) as servers,
    ):
        assert servers.submit(REQUEST).result(30) == other


def test_a_server_that_answers_other_requests_may_take_all_of_the_time_for_one() -> None:
    """A long completion stays where it is being written."""
    slow_answer = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"{}", seconds=3.0)
    with (
        hostile_server(slow_answer, body(b"{}")) as (url, _),
        hostile_server(body(b"{}")) as (other, _),
        closing(ServerPool([url, other], 4.0, answer_seconds=4.0)) as servers,
    ):
        long = servers.submit(REQUEST)
        wait_for(lambda: servers.servers[0].calls == 1, 2)
        time.sleep(0.2)  # until the server has begun with it
        assert servers.score([REQUEST], url) == [url]
        assert long.result(30) == url


def test_a_server_that_says_later_is_asked_again_before_the_limit() -> None:
    later = body(b"", status=503, more=b"Retry-After: 60\r\n")
    with hostile_server(later, later, body(b'{"reward": 2}')) as (url, headers):
        assert reward(url) == 2
        assert len(headers) == 3


def npz() -> str:
    file = io.BytesIO()
    np.savez(file, np.zeros((3, 2)))
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(("call", "error"), refused_calls("lies of servers"))
def test_a_lie_is_an_error_that_says_what_was_expected(call: str, error: str) -> None:
    kind, old, new = eval(call)
    content, read = true_answers()[kind]
    text = content.decode()
    lie = json.dumps({"prompt_token_id_logprobs": npz()}) if new == "npz" else text.replace(old, new)
    with pytest.raises(ValueError, match=error):
        read(HttpAnswer(200, lie.encode(), {"metadata": METADATA}))
    read(HttpAnswer(200, content, {"metadata": METADATA}))


def test_another_version_of_a_server_is_said_and_another_format_is_refused() -> None:
    def other(**info: Any) -> str | None:
        answer = HttpAnswer(200, json.dumps(INFO | info).encode(), server="http://a:1")
        return StillhouseApi().other_version(lambda path, body: answer)

    assert other(stillhouse=__version__, wire=WIRE_FORMAT) is other(stillhouse=__version__) is None
    assert other(stillhouse="0.0.9") == (
        f"http://a:1 runs Stillhouse '0.0.9', and this is {__version__}: expected the same version on both sides"
    )
    with pytest.raises(ValueError, match=rf"runs Stillhouse '9', and this is {__version__}, whose wire"):
        other(stillhouse="9", wire=WIRE_FORMAT + 1, images={"of": "another form"})
