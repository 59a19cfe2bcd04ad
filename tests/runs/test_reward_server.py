"""Rewards of a user's server, alone and in a weighted sum: answers, errors, retries, and a run that continues."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import pytest
from kit import slow
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import contents, json_lines, metrics, refused_changes
from kit.stub_servers import QuietHandler, listen

from stillhouse.config.reward_sum import part_names
from stillhouse.config.servers import ServerError
from stillhouse.report.curves import draw_charts
from stillhouse.report.run_files import read_run
from stillhouse.serving.client import pool
from stillhouse.serving.client.reward_server import RewardServer
from stillhouse.user_code.functions import Turn

REWARDED = {"objective.loss": "policy_gradient + reverse_kl", "data.eval": 0, "rollout.schedule": "async"}
TURNS: list[Turn] = [{"role": "student", "text": " 5"}]
FUNCTIONS = """
def length(prompt, completion, record): return float(len(completion))
def vowels(prompt, completion, record): return float(sum(map(completion.count, "aeiou")) + len(record["prompt"]))
def both(*arguments): return 0.5 * length(*arguments) + 2 * vowels(*arguments)
"""


class Server:
    """answer: gives status and body for a request's JSON. requests: what was posted, as path and JSON."""

    def __init__(self, answer: Callable[[dict[str, Any]], tuple[int, bytes]]):
        self.requests: list[tuple[str, dict[str, Any]]] = []
        server = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, request))
                self.reply(*answer(request))

        self.http = listen(Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/reward?of=run"


Starter = Callable[..., Server]


@pytest.fixture
def servers() -> Iterator[Starter]:
    started: list[Server] = []

    def start(answer: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()


def reward_of(server: Server, record: Any = None) -> float:
    record = record or {"a": 1}
    with closing(RewardServer(server.url, f"rollout.reward: {server.url}", 1.0, lambda line: None)) as client:
        return client.request("rollout.reward", "", "2 + 2 =", " 5", record, "train.jsonl:3", TURNS).result(30)


def test_a_server_gets_prompt_completion_and_record(servers: Starter) -> None:
    server = servers(lambda request: (200, b'{"reward": 0.5, "more": "is not read"}'))
    assert reward_of(server) == 0.5
    expected = {"prompt": "2 + 2 =", "completion": " 5", "record": {"a": 1}, "turns": TURNS}
    assert server.requests == [("/reward?of=run", expected)]
    with pytest.raises(ValueError, match=r"rollout\.reward: .*: the record of train\.jsonl:3 cannot be sent as JSON"):
        reward_of(server, {"raw": b"bytes"})


@pytest.mark.parametrize(("answer", "text"), refused_changes("answer of a reward"))
def test_an_answer_that_is_no_reward(
    monkeypatch: pytest.MonkeyPatch, servers: Starter, answer: str, text: str
) -> None:
    monkeypatch.setattr(pool, "FIRST_PAUSE", 0.01)
    status, body, count = eval(answer)
    server = servers(lambda request: (status, body))
    with pytest.raises(ValueError if count == 1 else ServerError, match=re.escape(text)) as raised:
        reward_of(server)
    assert status in (200, 503) or f": {status} " in str(raised.value)
    assert not count or len(server.requests) == count


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "summed_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def vowels(request: dict[str, Any]) -> bytes:
    count = sum(map(request["completion"].count, "aeiou")) + len(request["record"]["prompt"])
    return json.dumps({"reward": count}).encode()


@pytest.mark.parametrize(("workers", "processes"), [(0, 1), slow(2, 2)])
@pytest.mark.usefixtures("functions")
def test_a_weighted_sum_is_that_of_one_function(
    tmp_path: Path, servers: Starter, workers: int, processes: int
) -> None:
    """Some requests fail once, and answers come in another order than the requests. The same in evaluations."""

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        number = len(server.requests)
        time.sleep(number % 3 / 50)
        return (503, b"") if number % 7 == 2 else (200, vowels(request))

    server = servers(answer)
    of_eval = {"data": str(tmp_path / "train.jsonl"), "count": 3, "max_new_tokens": 5}
    settings = {"train.steps": 4, "parallel.fsdp": processes, "eval.prompts": of_eval, "eval.every": 2}
    write_on_policy_run(tmp_path, **REWARDED, **settings)
    arguments = ("distill", tmp_path / "run.yaml")
    reward, total = "0.5*summed_rewards:length", "summed_rewards:both"
    keys = "rollout.reward", "eval.prompts.reward"
    run_ranks(processes, *arguments, *(f"{key}={total}" for key in keys), f"out={tmp_path / 'one'}")
    summed = [f"{key}={reward} + 2*{server.url}" for key in keys]
    run_ranks(processes, *arguments, *summed, f"rollout.workers={workers}")
    figures, names = rollout_figures(tmp_path / "out"), ["length", urlsplit(server.url).netloc + "/reward"]
    parts = [[line.pop(f"rollout/reward/{name}") for name in names] for line in figures]
    assert figures == rollout_figures(tmp_path / "one")
    for line, (length, of_server) in zip(figures, parts, strict=True):
        assert 0.5 * length + 2 * of_server == pytest.approx(line["rollout/reward"])
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "one" / "model")
    runs = [metrics(tmp_path / name) for name in ("one", "out")]
    of_eval_one, of_eval_two = ([line for line in lines if "eval/prompts/reward" in line] for lines in runs)
    assert [line["step"] for line in of_eval_two] == [0, 2, 4]
    for one, two in zip(of_eval_one, of_eval_two, strict=True):
        assert one["eval/prompts/reward"] == two["eval/prompts/reward"]
        length, of_server = (two[f"eval/prompts/reward/{name}"] for name in names)
        assert 0.5 * length + 2 * of_server == pytest.approx(two["eval/prompts/reward"])
    shown = json_lines(tmp_path / "out" / "eval_samples.jsonl")
    expected = [(step, number) for step in (0, 2, 4) for number in range(3)]
    assert [(sample["step"], sample["number"]) for sample in shown] == expected
    for sample in (*json_lines(tmp_path / "out" / "samples.jsonl"), *shown):
        length, of_server = (sample["reward_parts"][name] for name in names)
        assert 0.5 * length + 2 * of_server == sample["reward"]
    assert fmean(sample["reward"] for sample in shown[:3]) == pytest.approx(of_eval_two[0]["eval/prompts/reward"])
    titles = [chart.title for chart in draw_charts([read_run(tmp_path / "out")])]
    assert {"Reward: length", "Reward of completions: length"} <= set(titles)


def test_names_of_the_parts_differ_and_have_no_query() -> None:
    reward = "a:f + 2*b.c:f + 0.5*http://host:1/x/?of=run + http://host:1/x"
    assert part_names(reward) == ["f", "f-2", "host:1/x", "host:1/x-2"]
    assert part_names("2*a:f") == part_names(None) == []


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.usefixtures("functions")
def test_a_run_whose_server_is_lost_continues_with_the_same_samples(
    tmp_path: Path, servers: Starter, processes: int
) -> None:
    is_lost = threading.Event()

    def answer(request: dict[str, Any]) -> tuple[int, bytes]:
        if len(server.requests) > 20:
            is_lost.set()
        return (503, b"") if is_lost.is_set() and not is_back.is_set() else (200, vowels(request))

    server, is_back = servers(answer), threading.Event()
    settings = {"rollout.reward": server.url, "rollout.timeout": 2, "checkpoint.every": 0, "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **REWARDED | settings)
    arguments = ("distill", tmp_path / "run.yaml")
    ranks = Ranks(processes, *arguments)
    assert ranks.wait() == [1] * processes, ranks.texts
    assert "no server of the reward has answered for 2 seconds" in ranks[0].err
    assert "Traceback" not in ranks.err
    assert len(list((tmp_path / "out" / "checkpoints").glob("step-*"))) == 1
    is_back.set()
    run_ranks(processes, *arguments)
    run_ranks(processes, *arguments, f"out={tmp_path / 'undisturbed'}")
    assert rollout_figures(tmp_path / "out") == rollout_figures(tmp_path / "undisturbed")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "undisturbed" / "model")
