"""Rewards, environments and callbacks that end the process, hang, raise, change their record or return nonsense."""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import contents, run, wait_for, write_run
from kit.signal_hooks import signal_at
from kit.toy_tokenizer import toy_tokenizer

from stillhouse import preemption
from stillhouse.generation.hooks import (
    UserFunction,
    checked_reply,
    checked_reward,
    load_function,
)

REWARDED = {"objective.loss": "policy_gradient + reverse_kl", "data.eval": 0}
#: seconds after which a run with a function that does not return must have ended
SOON = 12.0


def one(*arguments: Any) -> float:
    return 1.0


def leaves(prompt: str, completion: str, record: dict[str, Any]) -> float:
    sys.exit(0)


def divides(prompt: str, completion: str, record: dict[str, Any]) -> float:
    def inner() -> float:
        return 1 / (len(record) - len(record))

    return inner()


def recurses(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return recurses(prompt, completion, record)


def out_of_memory(prompt: str, completion: str, record: dict[str, Any]) -> float:
    return float(len(bytearray(2**60)))


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


def without_words(prompt: str, completion: str, record: dict[str, Any]) -> float:
    raise SilentError


def long_words(prompt: str, completion: str, record: dict[str, Any]) -> float:
    raise KeyError("\x1b[2J" + 1000 * "long " + "\n" + 1000 * "lines\n")


def interrupted(prompt: str, completion: str, record: dict[str, Any]) -> float:
    raise GeneratorExit


def control_c(prompt: str, completion: str, record: dict[str, Any]) -> float:
    raise KeyboardInterrupt


def huge(prompt: str, completion: str, record: dict[str, Any]) -> int:
    return 10**5000


def half(prompt: str, completion: str, record: dict[str, Any]) -> str:
    return " a\ud800"


class OwnFloat(float):
    def __float__(self) -> float:
        raise RuntimeError

    __repr__ = __float__  # type: ignore[assignment]


class OwnText(str):
    def encode(self, *_: Any) -> bytes:  # type: ignore[override]
        raise RuntimeError


_released = threading.Event()


def leaves_a_thread(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """As after `future.result(timeout)` of a checker that hangs."""
    if not any(thread.name == "checker" for thread in threading.enumerate()):
        threading.Thread(target=_released.wait, name="checker", daemon=False).start()
    return float(len(completion))


def counts(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A reward that changes its record. It depends on its arguments alone if it always gets the same record."""
    record["seen"] = [*record.get("seen", []), completion]
    record.pop("completion", None)
    return float(len(completion) * len(record["seen"]))


def remembers(prompt: str, completion: str, record: dict[str, Any]) -> str | None:
    """An environment that changes its record."""
    record["turns"] = record.get("turns", 0) + 1
    return None if completion.count("!") >= 2 else record["turns"] * " no!"


def floods(prompt: str, completion: str, record: dict[str, Any]) -> str:
    return " of two words" * 8_000_000


_marked: list[Path] = []


def mark(path: str) -> None:
    """A hook of a run's processes: a function that hangs marks this file. It has a second to return."""
    _marked.append(Path(path))
    preemption.SECONDS_TO_RETURN = 1.0


def _hangs_when_warm() -> bool:
    """Whether a reward or callback is to hang: from the second call on that comes after the file `warm`."""
    return Path(f"{_marked[0]}.warm").exists()


def sleeps(prompt: str, completion: str, record: dict[str, Any]) -> float:
    if _hangs_when_warm():
        _marked[0].touch()
        time.sleep(1000)
    return float(len(completion))


def computes(prompt: str, completion: str, record: dict[str, Any]) -> float:
    if _hangs_when_warm():
        _marked[0].touch()
        while True:
            try:
                time.monotonic()
            except Exception:  # noqa: BLE001
                continue
    return float(len(completion))


def matches(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """A regular expression that never ends lets no other thread run."""
    if _hangs_when_warm():
        _marked[0].touch()
        re.match(r"(a+)+$", 60 * "a" + "b")
    return float(len(completion))


def gives_up(prompt: str, completion: str, record: dict[str, Any]) -> float:
    try:
        return sleeps(prompt, completion, record)
    except:  # noqa: E722
        return 0.0


def fails_then(prompt: str, completion: str, record: dict[str, Any]) -> float:
    try:
        return sleeps(prompt, completion, record)
    except BaseException as error:
        raise ValueError("the answer cannot be checked") from error


def refuses_to_end(prompt: str, completion: str, record: dict[str, Any]) -> float:
    if _hangs_when_warm():
        _marked[0].touch()
        while True:
            try:
                time.sleep(1000)
            except BaseException:  # noqa: BLE001  so do some libraries
                continue
    return float(len(completion))


def evaluates_for_ever(context: Any) -> dict[str, float]:
    if context.step >= 2 and _hangs_when_warm():
        _marked[0].touch()
        time.sleep(1000)
    return {"one": 1.0}


def raises_in_callback(context: Any) -> dict[str, float]:
    raise RuntimeError(f"at step {context.step}")


def moves(prompt: str, completion: str, record: dict[str, Any]) -> float:
    os.chdir("/")
    return 1.0


def moves_and_fails(prompt: str, completion: str, record: dict[str, Any]) -> float:
    os.chdir("/")
    raise ZeroDivisionError


def removes(prompt: str, completion: str, record: dict[str, Any]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return 1.0


def widens(prompt: str, completion: str, record: dict[str, Any]) -> float:
    torch.set_default_dtype(torch.float64)
    return 1.0


def stops_gradients(prompt: str, completion: str, record: dict[str, Any]) -> float:
    torch.set_grad_enabled(False)
    return 1.0


def named(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def loaded(function: Any) -> UserFunction:
    return UserFunction("rollout.reward", named(function), function)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (leaves, "raises SystemExit: 0"),
        (divides, "raises ZeroDivisionError: division by zero"),
        (recurses, "raises RecursionError: maximum recursion depth exceeded"),
        (out_of_memory, "raises MemoryError"),
        (without_words, "raises SilentError: <exception str() failed>"),
        (long_words, r"raises KeyError: '\x1b[2Jlong long"),
        (interrupted, "raises GeneratorExit"),
        (huge, "gives an integer of 16,610 bits"),
    ],
)
def test_an_error_names_the_function_the_record_and_the_users_frames(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^rollout\.reward: ") as raised:
        checked_reward(loaded(function), "2 + 2 =", " 5", {"a": 1}, "train.jsonl:3")
    first, *frames = str(raised.value).splitlines()
    assert first.startswith(f"rollout.reward: {named(function)} {message}")
    assert " for the completion ' 5' of train.jsonl:3" in first
    assert len(first) < 700
    assert len(frames) <= 18
    if function is huge:
        assert not frames
    else:
        assert frames[0].startswith(f'  File "{__file__}", line ')
        assert frames[0].endswith(f"in {function.__name__}")
    if function is divides:
        assert frames[2].endswith("in inner")
        assert frames[3].strip() == "return 1 / (len(record) - len(record))"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (moves, "changes the working directory"),
        (moves_and_fails, "raises ZeroDivisionError"),
        (removes, "changes the working directory"),
        (widens, "changes torch's default dtype"),
        (stops_gradients, "changes whether torch records gradients"),
    ],
)
def test_a_function_that_changes_the_process_is_refused_and_its_change_undone(function: Any, words: str) -> None:
    folder = os.getcwd()
    with pytest.raises(ValueError, match=rf"^rollout\.reward: \S+ {words}.* for the completion ' 5' of a:3"):
        checked_reward(loaded(function), "", " 5", {}, "a:3")
    assert os.getcwd() == folder
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_a_function_gets_a_copy_of_the_record() -> None:
    record = {"completion": " 4.", "more": {"seen": []}}
    rewards = [checked_reward(loaded(counts), "2 + 2 =", " 5", record, "train.jsonl:3") for _ in range(3)]
    assert rewards == [2.0, 2.0, 2.0]
    assert [checked_reply(loaded(remembers), "", "", record, "train.jsonl:3") for _ in range(2)] == [" no!", " no!"]
    assert record == {"completion": " 4.", "more": {"seen": []}}


def test_a_decorator_may_change_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import functools\ndef g(a): return len(a)\n@functools.wraps(g)\ndef f(*given): return g(given[1])\n"
    (tmp_path / "decorated_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    function = load_function("rollout.reward", "decorated_rewards:f", ("prompt", "completion", "record"))
    assert checked_reward(function, "", "four", {}, "a:1") == 4.0


def test_ctrl_c_of_a_program_that_uses_the_library_is_no_error_of_the_function() -> None:
    with pytest.raises(KeyboardInterrupt):
        checked_reward(loaded(control_c), "", " 5", {}, "a:3")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (OwnFloat(2), 2.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (OwnFloat("nan"), "gives nan for"),
        (np.float32("inf"), "gives float32 for"),
        (np.str_("1"), "gives '1' for"),
    ],
    ids=range(7),
)
def test_numbers_of_other_types(value: Any, expected: float | str) -> None:
    reward = UserFunction("rollout.reward", "m:f", lambda *_: value)
    if isinstance(expected, float):
        assert checked_reward(reward, "", " 5", {}, "a:3") == expected
    else:
        with pytest.raises(ValueError, match=expected):
            checked_reward(reward, "", " 5", {}, "a:3")


def test_a_subclass_of_text_is_text() -> None:
    reply = checked_reply(UserFunction("rollout.environment", "m:f", lambda *_: OwnText(" no")), "", "", {}, "a:3")
    assert type(reply) is str
    assert reply == " no"


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair at character 3 for the completion ' 5' of a:3"):
        checked_reply(loaded(half), "2 + 2 =", " 5", {}, "a:3")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(0)", "importing {module} raises SystemExit: 0"),
        ("1 / 0", "importing {module} raises ZeroDivisionError: division by zero"),
        ("import no_such_library", "raises ModuleNotFoundError: No module named 'no_such_library'"),
        (
            "def f(prompt, completion): ...",
            "takes (prompt, completion): expected a function(prompt, completion, record)",
        ),
        ("def f(prompt, completion, record, *, more): ...", "takes (prompt, completion, record, *, more)"),
        ("f = 3", "has no function 'f'"),
    ],
)
def test_a_module_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, code: str, message: str
) -> None:
    module = f"rewards_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(f"{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"got '{module}:f'") as raised:
        load_function("rollout.reward", f"{module}:f", ("prompt", "completion", "record"))
    assert message.format(module=module) in str(raised.value).splitlines()[0]
    if "importing" in str(raised.value):
        assert f'\n  File "{tmp_path / module}.py", line 1, in <module>\n    {code}' in str(raised.value)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (REWARDED | {"rollout.reward": named(leaves)}, "leaves raises SystemExit: 0 for the completion"),
        (REWARDED | {"rollout.reward": named(control_c)}, "control_c raises KeyboardInterrupt for the completion"),
        (REWARDED | {"rollout.reward": named(divides)}, "divides raises ZeroDivisionError: division by zero for the"),
        ({"rollout.environment": named(half), "rollout.stop": ["e", "a"]}, "half gives a text with half of a surrog"),
        ({"eval.callbacks": [named(raises_in_callback)]}, "raises_in_callback raises RuntimeError: at step 0\n"),
    ],
)
def test_a_run_ends_with_one_line_and_the_users_frames(
    tmp_path: Path, settings: dict[str, Any], words: str, processes: int
) -> None:
    write_on_policy_run(tmp_path, **settings)
    ranks = Ranks(processes, "distill", tmp_path / "run.yaml")
    assert ranks.wait() == [1] * processes, ranks.texts
    assert (
        f"error: {next(key for key in settings if key.startswith(('rollout.r', 'rollout.e', 'eval.c')))}: "
        in ranks.err
    )
    assert words in ranks[0].err
    assert ("train.jsonl:" in ranks[0].err) == ("eval.callbacks" not in settings)
    assert "Traceback" not in ranks.err
    assert "stillhouse/" not in ranks.err.replace(str(tmp_path), "")
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["one_step_off", pytest.param("async", marks=pytest.mark.slow)])
def test_functions_that_change_their_record_make_the_same_run_after_a_kill(
    tmp_path: Path, schedule: str, processes: int
) -> None:
    functions = {"rollout.reward": named(counts), "rollout.environment": named(remembers)}
    settings = (
        REWARDED | functions | {"rollout.stop": ["e", "a"], "rollout.schedule": schedule, "checkpoint.every": 2}
    )
    # every prompt comes several times
    write_on_policy_run(tmp_path, **settings, **{"rollout.prompts_per_step": 8, "parallel.fsdp": processes})
    arguments = ("distill", tmp_path / "run.yaml")
    run_ranks(processes, *arguments, f"out={tmp_path / 'undisturbed'}")
    killed = Ranks(processes, *arguments, hook=signal_at, hook_arguments=(3, signal.SIGKILL))
    assert killed.wait(grace=1)[0] == -signal.SIGKILL
    run_ranks(processes, *arguments)
    assert rollout_figures(tmp_path / "out") == rollout_figures(tmp_path / "undisturbed")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "undisturbed" / "model")


@pytest.mark.parametrize(
    ("function", "after", "processes"),
    [
        (gives_up, 0, 1),
        pytest.param(matches, 0, 1, marks=pytest.mark.slow),
        *(
            pytest.param(function, after, processes, marks=pytest.mark.slow)
            for function in (gives_up, matches, sleeps, computes, fails_then, refuses_to_end)
            for after, processes in ((0, 2), (3, 1))
        ),
        pytest.param(gives_up, 3, 2, marks=pytest.mark.slow),
        pytest.param(refuses_to_end, 0, 1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_reward_that_hangs(tmp_path: Path, function: Any, after: int, processes: int) -> None:
    """Afterwards the run goes on as if nothing had happened. Only a function that catches everything costs the steps
    since the last checkpoint."""
    settings = REWARDED | {"rollout.reward": named(function), "rollout.schedule": "one_step_off"}
    write_on_policy_run(tmp_path, **settings, **{"checkpoint.every": 0, "parallel.fsdp": processes})
    arguments, hangs, out = ("distill", tmp_path / "run.yaml"), tmp_path / "hangs", tmp_path / "out"
    hook: dict[str, Any] = {"hook": mark, "hook_arguments": (str(hangs),)}
    run_ranks(processes, *arguments, f"out={tmp_path / 'undisturbed'}", **hook)
    if not after:
        Path(f"{hangs}.warm").touch()
    ranks = Ranks(processes, *arguments, **hook)
    if after:
        wait_for(lambda: len(rollout_figures(out)) >= after if (out / "metrics.jsonl").exists() else False)
        Path(f"{hangs}.warm").touch()
    wait_for(hangs.exists)
    ranks.send(signal.SIGTERM)
    started = time.monotonic()
    codes = ranks.wait(SOON, grace=SOON)
    assert time.monotonic() - started < SOON + 5 * (processes - 1)
    assert codes[0] == 128 + signal.SIGTERM, ranks.texts
    assert "Traceback" not in ranks.err
    if function is refuses_to_end:
        assert f"rollout.reward: {named(function)} does not return; stopped by SIGTERM" in ranks[0].err
    else:
        assert codes == [128 + signal.SIGTERM] * processes, ranks.texts
        assert len(list((out / "checkpoints").glob("step-*"))) == (after > 0)
    Path(f"{hangs}.warm").unlink()
    run_ranks(processes, *arguments, **hook)
    assert rollout_figures(out) == rollout_figures(tmp_path / "undisturbed")
    assert contents(out / "model") == contents(tmp_path / "undisturbed" / "model")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_callback_that_hangs_and_the_next_start_repeats_the_evaluation(
    tmp_path: Path, processes: int
) -> None:
    settings = {"eval.callbacks": [named(evaluates_for_ever)], "eval.every": 2, "eval.task_tokens": 4}
    write_run(tmp_path, **settings, **{"checkpoint.every": 0, "parallel.fsdp": processes})
    arguments, hangs = ("distill", tmp_path / "run.yaml"), tmp_path / "hangs"
    hook: dict[str, Any] = {"hook": mark, "hook_arguments": (str(hangs),)}
    Path(f"{hangs}.warm").touch()
    ranks = Ranks(processes, *arguments, **hook)
    wait_for(hangs.exists)
    ranks.send(signal.SIGTERM)
    assert ranks.wait(SOON, grace=SOON) == [128 + signal.SIGTERM] * processes, ranks.texts
    assert "stopped by SIGTERM after step 2; checkpoint " in ranks[0].err
    Path(f"{hangs}.warm").unlink()
    run_ranks(processes, *arguments, **hook)
    lines = [line for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines() if "eval/one" in line]
    assert len(lines) == 4


@pytest.mark.parametrize("text", [floods("", "", {}), 100_000_000 * " ", 30_000_000 * "\u200b"], ids=("a", "b", "c"))
def test_only_the_beginning_of_a_long_reply_is_tokenized(tmp_path: Path, text: str) -> None:
    from stillhouse.data.render.tokenizers import tokenize
    from stillhouse.generation import RolloutPlan, SampleWriter

    tokenizer = toy_tokenizer()
    writer = SampleWriter(None, None, RolloutPlan(1, 0, 1, 1, 0), tokenizer, 512)  # type: ignore[arg-type]
    started = time.monotonic()
    ids = writer._reply_ids(text, 512)
    assert time.monotonic() - started < 10
    assert len(ids) > 512
    assert ids[:512] == tokenize(tokenizer, [text[:20_000]], special=False)[0][:512]
    short = text[:40]
    assert writer._reply_ids(short, 512) == tokenize(tokenizer, [short], special=False)[0]


def test_a_reply_of_100_mb_ends_its_sample(tmp_path: Path) -> None:
    write_on_policy_run(
        tmp_path, **{"rollout.environment": named(floods), "rollout.stop": ["e", "a"], "train.steps": 1}
    )
    run("distill", tmp_path / "run.yaml")
    assert rollout_figures(tmp_path / "out")[0]["rollout/completion_tokens"] <= 11


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_a_complete_run(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **REWARDED | {"rollout.reward": named(leaves_a_thread), "train.steps": 1})
    command = run("distill", tmp_path / "run.yaml")
    assert command.err.startswith("warning: the process ends without the threads 'checker'")
    assert (tmp_path / "out" / "model").is_dir()


@pytest.fixture(autouse=True)
def _unmarked() -> Iterator[None]:
    yield
    _marked.clear()
