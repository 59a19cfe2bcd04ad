"""Tokens of servers: each server gets its own, and none stands in a message or goes to another server."""

from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
from kit.config_cases import load
from kit.stub_servers import Fault, body, hostile_server, raw

from stillhouse.config import ConfigError, RolloutConfig, TeacherConfig
from stillhouse.config.servers import TOKEN_VARIABLE, ServerError, server_token
from stillhouse.parallel.processes import log_rank0
from stillhouse.process import print_line
from stillhouse.rollout import Completion, Sample
from stillhouse.rollout.user_functions import CompletionCalls
from stillhouse.serving.client.pool import ServerPool
from stillhouse.serving.client.reward_server import RewardServer
from stillhouse.serving.client.served_teacher import connect

SECRET = "s3cret-of-the-writer"
TEACHER, WRITER = "teacher={url: 'http://a:1'%s}", "rollout={url: 'http://b:1', engine: vllm%s}"


def sent(headers: Sequence[dict[str, str]]) -> set[str | None]:
    return {request.get("Authorization") for request in headers}


def test_a_reward_server_gets_its_own_token_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    monkeypatch.setenv("ONE", "token-of-one")
    answer = body(b'{"reward": 2}')
    with hostile_server(answer) as (one, of_one), hostile_server(answer) as (two, of_two):
        text = f"{one}/a + 3*{two}/a + 5*{one}/b"
        rollout = RolloutConfig(reward=text, reward_tokens={one: "ONE"})
        with closing(CompletionCalls([rollout], None, None, [None])) as calls:
            assert calls.sources[0].reward is not None
            reward = calls.sources[0].reward.request("2 + 2 =", " 5", {}, "train.jsonl:3", [])
            ids_N = np.zeros(1, np.int32)
            assert reward.added_to(Sample(0, 0, Completion(ids_N, ids_N, ids_N, "stop"))).reward == 18
        assert (sent(of_one), sent(of_two)) == ({"Bearer token-of-one"}, {None})


@pytest.mark.parametrize("variable", [None, "TEACHER"])
def test_a_teacher_gets_the_token_of_its_section(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    monkeypatch.setenv("TEACHER", "token-of-teacher")
    with hostile_server(body(b"", status=401)) as (url, headers):
        teacher = TeacherConfig(url=url, token_variable=variable, timeout=5.0)
        with pytest.raises(ValueError, match="answers 401: expected 200; check the bearer token") as caught:
            connect(teacher, 1.0)
        assert sent(headers) == {f"Bearer {SECRET if variable is None else 'token-of-teacher'}"}
        assert SECRET not in str(caught.value)


def test_no_token_follows_a_redirect() -> None:
    with hostile_server(body(b"{}")) as (other, of_other):
        moved = body(b"", status=307, more=f"Location: {other}/v1/info\r\n".encode())
        with hostile_server(moved) as (url, headers), closing(ServerPool([url], 5.0, token=SECRET)) as pool:
            assert pool.asker(url)("/v1/info", None).status == 307
        assert sent(headers) == {f"Bearer {SECRET}"}
        assert of_other == []


def test_one_token_for_several_models_is_refused_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    both = TEACHER % "", WRITER % ""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    load(*both)
    monkeypatch.setenv(TOKEN_VARIABLE, SECRET)
    with pytest.raises(
        ConfigError, match=r"^teacher\.token_variable: is null, and teacher\.url and rollout\.url"
    ) as it:
        load(*both)
    assert SECRET not in str(it.value)
    load(TEACHER % "")
    load("teacher={model: t}", WRITER % "")
    load(*(section % f", token_variable: {TOKEN_VARIABLE}" for section in (TEACHER, WRITER)))
    with pytest.raises(ConfigError, match=r"^rollout\.token_variable: is null"):
        load(TEACHER % ", token_variable: TEACHER", WRITER % "")
    two = "teachers={a: {url: 'http://a:1', token_variable: TEACHER}, b: {url: 'http://b:1'}}"
    with pytest.raises(ConfigError, match=r"^teachers\.b\.token_variable: is null"):
        load(two)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, "is not set"), ("", "is not set"), ("s3cret\r\nX: 1", "has spaces"), ("s3crét", "has spaces")],
)
def test_what_is_no_token_is_not_shown(monkeypatch: pytest.MonkeyPatch, value: str | None, problem: str) -> None:
    monkeypatch.delenv("MINE", raising=False)
    if value is not None:
        monkeypatch.setenv("MINE", value)
    with pytest.raises(
        ValueError, match=f"^teacher.token_variable: the environment variable MINE {problem}"
    ) as caught:
        server_token("teacher.token_variable", "MINE")
    assert "s3cr" not in str(caught.value)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert server_token("teacher.token_variable", None) is None


@pytest.mark.parametrize(
    "answer",
    [
        body(f'{{"error": {{"message": "bad Bearer {SECRET}"}}}}'.encode(), status=503),
        body(f'{{"reward": "Bearer {SECRET}"}}'.encode()),
        raw(f"HTTP/1.1 200 OK\r\nBearer {SECRET}\r\n\r\n".encode()),
        raw(f"HTTP/1.1 200 OK\r\nContent-Encoding: Bearer {SECRET}\r\n\r\n".encode()),
    ],
    ids=["an error", "a value", "no header", "a header"],
)
def test_a_server_that_repeats_the_token_does_not_bring_it_into_a_message(answer: Fault) -> None:
    lines: list[str] = []
    with (
        hostile_server(answer) as (url, headers),
        closing(RewardServer(f"{url}/reward", "rollout.reward", 0.5, lines.append, SECRET)) as server,
    ):
        with pytest.raises((ValueError, ServerError)) as caught:
            server.request("rollout.reward", "", "2 + 2 =", " 5", {}, "train.jsonl:3", []).result(30)
        assert sent(headers) == {f"Bearer {SECRET}"}
    message = f"{caught.value} {lines}"
    assert SECRET not in message
    assert f"Bearer {'*' * len(SECRET)}" in message or "Timeout" in message


def test_no_line_controls_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """The lines of a run's log and of its end, whatever a server or a file has put into them."""
    hostile = "\x1b]0;owned\x07 \x9b2J \u202e \ud800\nnext"
    log_rank0(hostile)
    print_line(hostile)
    shown = capfd.readouterr()
    assert shown.out == shown.err == "\\x1b]0;owned\\x07 \\x9b2J \\u202e \\ud800\nnext\n"
