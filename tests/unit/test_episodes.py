"""Environments that are classes: an object per sample, in its worker, whose turns are repeated when it is lost."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.config_cases import refused_calls

from stillhouse.agents.environments import TextEnvironment
from stillhouse.user_code.environment import Episode
from stillhouse.user_code.function_calls import CallLostError, FunctionCalls
from stillhouse.user_code.functions import ENVIRONMENT, TOOLS, load_function

CODE = '''
import os
import time
from pathlib import Path

class Game:
    def reset(self, prompt, record):
        self.turns, self.record = [prompt], record
        self.log("reset")

    def step(self, turn):
        self.turns.append(turn)
        self.log(turn)
        if turn == "die" and not Path(self.record["log"] + ".died").exists():
            Path(self.record["log"] + ".died").touch()
            os._exit(1)
        return None if turn == "end" else " | ".join(self.turns)

    def close(self):
        self.log("close")

    def reward(self):
        self.log("reward")
        return len(self.turns)

    def log(self, what):
        with open(self.record["log"], "a") as file:
            file.write(f"{os.getpid()} {what}\\n")

class Slow(Game):
    def step(self, turn):
        time.sleep(0.7)
        return turn

class Random(Game):
    def step(self, turn): return os.urandom(4).hex()

class Opens(Game):
    def reset(self, prompt, record): return "Hello"

class Number(Game):
    def step(self, turn): return 3

class Scores(Game):
    def reward(self): return "3"

class NoStep:
    def reset(self, prompt, record): ...

class Asks:
    def __init__(self, name): ...

class Two(Game):
    def step(self, turn, state): ...

def draw(a: str) -> str:
    """Draw.

    Args:
        a: Anything.
    """
    return os.urandom(4).hex()

def hang(a: str) -> str:
    """Hang.

    Args:
        a: Anything.
    """
    time.sleep(1000)
'''
Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def _classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "episode_games.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(params=["here", "workers"])
def ask(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ask]:
    """Asks the environment of sample `number` for its reply to the last of its turns."""
    record = {"log": str(tmp_path / "log")}
    pool = None
    if request.param == "here":
        call: Ask = TextEnvironment.answer("episode_games:Game", is_limited=False)
    else:
        pool = FunctionCalls([(ENVIRONMENT, "episode_games:Game")], 3)
        call = partial(pool.request, ENVIRONMENT, "episode_games:Game")

    def reply(number: int, *turns: str, replies: tuple[str, ...] = (), wants_reward: bool = False) -> Any:
        answer = call("Go", "".join(turns), record, "a:1", Episode(number, turns, replies, wants_reward))
        return answer.result(60) if isinstance(answer, Future) else answer

    yield reply
    if pool is not None:
        pool.close()


def log(folder: Path) -> list[str]:
    return [line.split()[1] for line in (folder / "log").read_text().splitlines()]


def test_a_sample_has_one_object_until_it_ends(ask: Ask, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    replies: dict[int, tuple[str, ...]] = {}
    for turn in range(3):
        for number in (0, 3, 4):
            turns = tuple(f"{number}.{at}" for at in range(turn + 1))
            reply = ask(number, *turns, replies=replies.get(number, ()))
            assert reply == " | ".join(["Go", *turns])
            replies[number] = (*replies.get(number, ()), reply)
    assert ask(4, "4.0", "4.1", "4.2", "end", replies=replies[4]) is None
    for number in (0, 3, 4):
        assert ask(number) is None
    assert ask(4) is None
    lines = log(tmp_path)
    assert lines.count("reset") == lines.count("close") == 3
    assert len(lines) == 16
    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    processes = {at: {pid for pid, what in rows if what.startswith(f"{at}.")} for at in (0, 3, 4)}
    assert all(len(of_sample) == 1 for of_sample in processes.values())
    if request.node.callspec.params["ask"] == "workers":  # 0 and 3 have the same remainder
        assert len(set.union(*processes.values())) == 3


def test_an_object_that_is_lost_gets_its_turns_again(ask: Ask, tmp_path: Path) -> None:
    assert ask(7, "one", "two", replies=("Go | one",)) == "Go | one | two"
    assert log(tmp_path) == ["reset", "one", "two"]
    with pytest.raises(
        ValueError, match=r"^rollout\.environment: episode_games:Game replies 'Go \| one' to a turn af"
    ):
        ask(8, "one", "two", replies=("Go | three",))


@pytest.mark.parametrize(
    ("before", "turns", "replies", "expected"),
    [
        (("one", "end"), ("one", "end"), ("Go | one",), ["reset", "one", "end", "reward"]),
        (("one",), ("one",), ("Go | one",), ["reset", "one", "reward"]),
        (("one",), ("one", "two"), ("Go | one",), ["reset", "one", "two", "reward"]),
        ((), ("one", "two"), ("Go | one",), ["reset", "one", "two", "reward"]),
        ((), (), (), ["reset", "reward"]),
    ],
    ids=["after its end", "a later turn was cut", "the last turn has no reply", "its object was lost", "no turn"],
)
def test_an_object_gives_the_reward_after_all_turns(
    ask: Ask, tmp_path: Path, before: tuple[str, ...], turns: tuple[str, ...], replies: Any, expected: list[str]
) -> None:
    for count in range(1, len(before) + 1):
        ask(7, *before[:count], replies=replies[: count - 1])
    reward = ask(7, *turns, replies=replies, wants_reward=True)
    assert (type(reward), reward) == (float, 1 + len(turns))
    assert ask(7) is None
    assert log(tmp_path) == [*expected, "close"]


def test_a_worker_that_dies_is_replaced_and_the_turns_are_repeated(tmp_path: Path) -> None:
    pool = FunctionCalls([(ENVIRONMENT, "episode_games:Game")], 1)
    call, record = partial(pool.request, ENVIRONMENT, "episode_games:Game"), {"log": str(tmp_path / "log")}
    first = call("Go", "", record, "a:1", Episode(1, ("one",))).result(60)
    other = call("Go", "", record, "a:1", Episode(2, ("a",))).result(60)
    dies = Episode(1, ("one", "die"), (first,))
    assert call("Go", "", record, "a:1", dies).result(60) == "Go | one | die"
    assert call("Go", "", record, "a:1", Episode(2, ("a", "b"), (other,))).result(60) == "Go | a | b"
    pool.close()
    assert log(tmp_path) == ["reset", "one", "reset", "a", "die", "reset", "one", "die", "reset", "a", "b"]
    pool = FunctionCalls([(ENVIRONMENT, "episode_games:Slow")], 1, seconds=1.5)
    call, turns = partial(pool.request, ENVIRONMENT, "episode_games:Slow"), ("a", "b", "c", "d")
    assert call("Go", "", {"log": str(tmp_path / "log")}, "a:1", Episode(1, turns, turns[:-1])).result(60) == "d"
    pool.close()


def test_tools_without_state_do_not_get_earlier_turns_again() -> None:
    paths = "episode_games:draw episode_games:hang"
    pool = FunctionCalls([(TOOLS, paths)], 1, seconds=2.0)
    call, draw, hang = partial(pool.request, TOOLS, paths), [("draw", {"a": "b"}, "")], [("hang", {"a": "b"}, "")]
    first = call("Go", "", {}, "a:1", Episode(1, (draw,))).result(60)
    with pytest.raises(CallLostError, match="does not return within 2 s"):
        call("Go", "", {}, "a:1", Episode(2, (hang,))).result(60)
    for number, turns, replies in ((1, (draw, draw), (first,)), (2, (hang, draw), (["lost"],))):
        [reply] = call("Go", "", {}, "a:1", Episode(number, turns, replies)).result(60)
        assert len(reply) == 8
    pool.close()


@pytest.mark.parametrize(("call", "words"), refused_calls("classes of environments"))
def test_a_class_that_cannot_be_used(call: str, words: str) -> None:
    name = eval(call)
    with pytest.raises(ValueError, match=rf"^got 'episode_games:{name}") as raised:
        load_function(ENVIRONMENT, f"episode_games:{name}")
    assert words in str(raised.value)


@pytest.mark.parametrize(("call", "words"), refused_calls("environments"))
def test_an_environment_that_gives_something_else(tmp_path: Path, call: str, words: str) -> None:
    name = eval(call)
    environment = TextEnvironment.answer(f"episode_games:{name}", is_limited=False)
    episode = Episode(1, ("one", "hi"), ("Go | one" if name == "Scores" else "",), name == "Scores")
    with pytest.raises(ValueError, match=r"^rollout\.environment: episode_games:") as raised:
        environment("Go", "hi", {"log": str(tmp_path / "log")}, "a:1", episode)
    assert words in str(raised.value)
