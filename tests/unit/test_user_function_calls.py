"""Calls of the user's functions: what they raise, return or change becomes one error with the user's frames."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.config_cases import refused_calls
from kit.on_policy_runs import episodic, one_source_plan, prompts
from kit.toy_tokenizer import toy_tokenizer
from kit.user_functions import control_c, half

from stillhouse.agents.episodes import checked_reply
from stillhouse.agents.replies import TextReplies
from stillhouse.data.render.tokenizers import tokenize
from stillhouse.rollout import Completion, Sample, Samples, SourceSettings
from stillhouse.rollout.reward import RepeatedCall, RewardSum, WeightedCall
from stillhouse.rollout.turns import SampleTurns, done
from stillhouse.rollout.user_functions import user_function, warn
from stillhouse.user_code.functions import Turn, UserFunction, UserFunctionError, checked_reward


class OwnFloat(float):
    def __float__(self) -> float:
        raise RuntimeError

    __repr__ = __float__  # type: ignore[assignment]


class OwnText(str):
    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        raise RuntimeError


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


def loaded(function: Callable[..., Any]) -> UserFunction:
    return UserFunction("rollout.reward", "m:f", function)


def raising(error: BaseException) -> Callable[..., float]:
    def fails(*_: Any) -> float:
        raise error

    return fails


# functions of this file, so that their frames have lines
exits, divides, fills = (
    *(lambda *_: sys.exit(0), lambda *_: raising(ZeroDivisionError("by zero"))()),
    lambda *_: bytearray(2**60),
)


def recurses(*arguments: Any) -> float:
    return recurses(*arguments)


def leaves_a_removed_folder(*_: Any) -> float:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return 1.0


def moves_and_fails(*_: Any) -> float:
    os.chdir("/")
    return 1 / 0


@pytest.mark.parametrize(("call", "message"), refused_calls("rewards"))
def test_an_error_names_the_function_the_record_and_the_users_frames(call: str, message: str) -> None:
    """frames: at most so many lines of a traceback, each entry with its line of code."""
    function, frames = eval(call)
    with pytest.raises(ValueError, match=r"^rollout\.reward: ") as raised:
        checked_reward(loaded(function), "2 + 2 =", " 5", {"a": 1}, "train.jsonl:3")
    first, *lines = str(raised.value).splitlines()
    assert first.startswith(f"rollout.reward: m:f {message}")
    assert " for the completion ' 5' of train.jsonl:3" in first
    assert len(first) < 700
    assert bool(frames) == bool(lines)
    assert len(lines) <= frames
    if lines:
        assert lines[0].startswith(f'  File "{__file__}", line ')
        assert lines[0].endswith(f"in {function.__name__}")
    if frames == 4:
        assert lines[2].endswith("in fails")
        assert lines[3].strip() == "raise error"


@pytest.mark.parametrize(("call", "words"), refused_calls("rewards that change the process"))
def test_a_function_that_changes_the_process_is_refused_and_its_change_undone(call: str, words: str) -> None:
    function = eval(call)
    folder = os.getcwd()
    with pytest.raises(ValueError, match=rf"^rollout\.reward: m:f {words}.* for the completion ' 5' of a:3"):
        checked_reward(loaded(function), "", " 5", {}, "a:3")
    assert os.getcwd() == folder
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_a_decorator_may_change_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import functools\ndef g(a): return len(a)\n@functools.wraps(g)\ndef f(*given): return g(given[1])\n"
    (tmp_path / "decorated_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    function = user_function("rollout.reward", "decorated_rewards:f")
    assert checked_reward(function, "", "four", {}, "a:1") == 4.0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(prompt, completion, record, *, turns): return turns.pop()['text'] == ' 5'", 1.0),
        ("def f(prompt, completion, record, turns=()): return len(turns)", 1.0),
        ("def f(prompt, completion, record, *, more=7): return more", 7.0),
        ("def f(prompt, completion, record, **more): return len(more)", 0.0),
        (
            "import functools\ndef g(a, b, c, *, turns=()): return len(turns)\n"
            "@functools.wraps(g)\ndef f(*given, **named): return g(*given, **named)",
            1.0,
        ),
    ],
    ids=range(5),
)
def test_a_reward_gets_the_turns_if_it_has_an_argument_of_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, code: str, expected: float
) -> None:
    module = f"turns_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    turns: list[Turn] = [{"role": "student", "text": " 5"}]
    for key in ("rollout.reward", "eval.prompts.reward"):
        assert checked_reward(user_function(key, f"{module}:f"), "", " 5", {}, "a:1", turns) == expected
    assert turns == [{"role": "student", "text": " 5"}]


def test_ctrl_c_of_a_program_that_uses_the_library_is_no_error_of_the_function() -> None:
    with pytest.raises(KeyboardInterrupt):
        checked_reward(loaded(control_c), "", " 5", {}, "a:3")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((OwnFloat(2), 2.0), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0)),
        *((OwnFloat("nan"), "nan"), (np.float32("inf"), "float32"), (np.str_("1"), "'1'")),
    ],
    ids=range(7),
)
def test_numbers_of_other_types(value: Any, expected: float | str) -> None:
    reward = loaded(lambda *_: value)
    if isinstance(expected, float):
        assert checked_reward(reward, "", " 5", {}, "a:3") == expected
    else:
        with pytest.raises(ValueError, match=f"gives {expected} for"):
            checked_reward(reward, "", " 5", {}, "a:3")


def test_replies_are_text() -> None:
    reply = checked_reply(loaded(lambda *_: OwnText(" no")), "", "", {}, "a:3")
    assert type(reply) is str
    assert reply == " no"
    with pytest.raises(ValueError, match="half of a surrogate pair at character 3 for the completion ' 5' of a:3"):
        checked_reply(loaded(half), "2 + 2 =", " 5", {}, "a:3")


@pytest.mark.parametrize(("call", "message"), refused_calls("modules of rewards"))
def test_a_module_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, call: str, message: str
) -> None:
    code = eval(call)
    module = f"rewards_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"got '{module}:f'") as raised:
        user_function("rollout.reward", f"{module}:f")
    assert message.format(module=module) in str(raised.value).splitlines()[0]
    if "importing" in str(raised.value):
        assert f'\n  File "{tmp_path / module}.py", line 1, in <module>\n    {code}' in str(raised.value)


@pytest.mark.parametrize(
    "text", [" of two words" * 8_000_000, 100_000_000 * " ", 30_000_000 * "\u200b"], ids=("a", "b", "c")
)
def test_only_the_beginning_of_a_long_reply_is_tokenized_and_it_ends_its_sample(text: str) -> None:
    tokenizer = toy_tokenizer()
    environment = TextReplies(episodic(lambda *_: done(text)), tokenizer)
    settings = SourceSettings(512, environment=environment, max_turns=9)
    samples = Samples(prompts(), one_source_plan(7, 0, 1, 1, 0), tokenizer, [settings])
    turn = Completion(np.array([7], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    started = time.monotonic()
    samples.start([(0, 0)])
    (request,) = samples.take_requests()
    samples.inbox.put((request.number, turn))
    samples.receive(0.0)
    (sample,) = samples.finished()
    assert time.monotonic() - started < 10
    assert sample.completion.finish == "length"
    assert sample.completion.ids_N[1:].tolist() == tokenize(tokenizer, [text[:20_000]], special=False)[0][:511]
    short = text[:40]
    turns = SampleTurns(0, ("", "", {}, "a:1"), [turn.ids_N], [])
    reply = environment.reply(turns, done(short), 512)
    assert reply is not None
    assert reply.ids == tokenize(tokenizer, [short], special=False)[0]


@pytest.mark.parametrize("late", [False, True], ids=["here", "elsewhere"])
def test_the_first_call_of_a_reward_is_repeated_once(capsys: pytest.CaptureFixture[str], late: bool) -> None:
    """late: the results come after all calls have been made, as those of servers and workers do."""

    def shown(results: list[float | UserFunctionError]) -> str:
        futures: list[Future[Any]] = []

        class Calls:
            def request(self, *arguments: Any) -> Future[Any]:
                futures.append(Future())
                result = results[len(futures) - 1]
                if not late and isinstance(result, UserFunctionError):
                    raise result
                if not late:
                    futures[-1].set_result(result)
                return futures[-1]

        repeated = RepeatedCall("rollout.reward: a:f", warn)
        reward = RewardSum("rollout.reward", [WeightedCall(1.0, Calls(), "rollout.reward", "a:f", repeated=repeated)])
        pending = [reward.request("", str(number), {}, "", []) for number in range(20)]
        for number in range(20):
            assert pending[number].futures == [futures[number + (number > 7)]]
        for future, result in zip(futures, results, strict=True):
            if late:
                fail = isinstance(result, UserFunctionError)
                future.set_exception(result) if fail else future.set_result(result)  # type: ignore[arg-type]
        sample = Sample(0, 0, Completion(np.zeros(1, np.int32), np.zeros(1), np.zeros(1), "stop"))
        rewards = [reward.added_to(sample).reward for reward in pending]
        assert rewards == [futures[n + (n > 7)].result() for n in range(20)]
        return capsys.readouterr().out

    same: list[float | UserFunctionError] = [float(number) for number in range(8)] + [0.0] + [1.0] * 12
    assert shown(same) == ""
    assert shown([0.1 + 0.2, *same[1:8], 0.3, *same[9:]]) == ""
    assert shown([*same[:8], 0.5, *same[9:]]).startswith("warning: rollout.reward: a:f gives 0 and later 0.5 for the")
    assert "gives 0 and later fails for the same" in shown([*same[:8], UserFunctionError("no"), *same[9:]])
