"""Runs whose rewards, environments and callbacks end the process, hang, raise, change their record or fail."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, contents, wait_for, write_run
from kit.signal_hooks import signal_at
from kit.user_functions import (
    computes,
    control_c,
    counts,
    evaluates_for_ever,
    fails_then,
    gives_up,
    half,
    leaves_a_thread,
    mark,
    matches,
    named,
    raises_in_callback,
    refuses_to_end,
    remembers,
    sleeps,
)

import stillhouse

REWARDED = {"objective.loss": "policy_gradient + reverse_kl", "data.eval": 0}
#: seconds after which a run with a function that does not return must have ended
SOON = 12.0
#: a reward, an environment and a callback that note what they are called with, and raise for the text in `wrong`
FAILING = """
from pathlib import Path

def note(text):
    with open("noted", "a") as file:
        file.write(f"{text}\\n")
    if Path("wrong").exists() and Path("wrong").read_text() == text:
        raise KeyError(text)

def reward(prompt, completion, record):
    note(prompt)
    return float(len(completion))

class Game:
    def reset(self, prompt, record):
        self.prompt, self.turns = prompt, 0

    def step(self, turn):
        self.turns += 1
        if self.turns == 2:
            note(self.prompt)
        return None if self.turns == 3 else f" {len(turn)}!"

def metric(context):
    note(f"step {context.step}")
    return {"one": 1.0}
"""


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (REWARDED | {"rollout.reward": named(control_c)}, "control_c raises KeyboardInterrupt for the completion"),
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
    assert str(Path(stillhouse.__file__).parent) not in ranks.err
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({"rollout.environment": "failing:Game", "rollout.reward": named(counts), "rollout.schedule": "async"}, 1),
        slow({"rollout.reward": "failing:reward", "rollout.schedule": "one_step_off"}, 1),
        slow({"rollout.reward": "failing:reward", "rollout.workers": 2, "rollout.schedule": "one_step_off"}, 2),
        slow({"rollout.environment": "failing:Game", "rollout.reward": named(counts)}, 2),
        slow({"rollout.reward": named(counts), "eval.callbacks": ["failing:metric"], "eval.every": 2}, 2),
    ],
)
def test_a_function_that_fails_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], processes: int
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    turns = {"rollout.stop": ["e", "a", "i"]} if "rollout.environment" in settings else {}
    common = {"checkpoint.every": 0, "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **REWARDED | settings | turns | common)
    arguments, out = ("distill", tmp_path / "run.yaml"), tmp_path / "out"
    run_ranks(processes, *arguments, f"out={tmp_path / 'undisturbed'}")
    noted = list(dict.fromkeys((tmp_path / "noted").read_text().splitlines()))
    (tmp_path / "wrong").write_text(noted[2 * len(noted) // 3])
    ranks = Ranks(processes, *arguments)
    assert ranks.wait() == [1] * processes, ranks.texts
    (saved,) = (out / "checkpoints").glob("step-*")
    first, *frames = ranks[0].err[ranks[0].err.index("error: ") :].splitlines()
    assert re.match(rf"error: \S+: failing:\S+ raises KeyError: '{noted[2 * len(noted) // 3]}'", first)
    assert first.endswith(
        f"; the run has stopped after a checkpoint: {saved}; correct the cause, and the same command continues"
    )
    assert frames[0].startswith(f'  File "{tmp_path / "failing.py"}", line ')
    (tmp_path / "wrong").unlink()
    run_ranks(processes, *arguments)
    assert rollout_figures(out) == rollout_figures(tmp_path / "undisturbed")
    assert contents(out / "model") == contents(tmp_path / "undisturbed" / "model")
    evaluations = [line for line in (out / "metrics.jsonl").read_text().splitlines() if "eval/one" in line]
    assert len(evaluations) == (4 if "eval.callbacks" in settings else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "processes"), [("one_step_off", 1), ("async", 2)])
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
        (matches, 0, 1),
        *(slow(function, 3, 1) for function in (gives_up, sleeps, computes, fails_then)),
        *(slow(function, 0, 2) for function in (matches, refuses_to_end)),
    ],
)
def test_a_signal_ends_a_reward_that_hangs(tmp_path: Path, function: Any, after: int, processes: int) -> None:
    """Afterwards the run goes on as if nothing had happened. Only a function that catches everything costs the steps
    since the last checkpoint. A line names a function that takes long, also one that holds Python's lock."""
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
    late = (
        rf"warning: rollout\.reward: {named(function)} has run for 0\.3 s for the completion .* of .*train\.jsonl:\d"
    )
    wait_for(lambda: re.search(late, ranks[0].err) is not None)
    ranks.send(signal.SIGTERM)
    started = time.monotonic()
    codes = ranks.wait(SOON, grace=SOON)
    assert time.monotonic() - started < SOON + 5 * (processes - 1)
    assert codes[0] == 128 + signal.SIGTERM, ranks.texts
    assert "Traceback" not in ranks.err
    assert f"a second signal ends the run at once; rollout.reward: {named(function)} is running\n" in ranks[0].err
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
def test_check_names_the_reward_that_runs_at_a_signal(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **REWARDED | {"rollout.reward": named(sleeps)})
    hangs = tmp_path / "hangs"
    Path(f"{hangs}.warm").touch()
    command = Command("check", tmp_path / "run.yaml", hook=mark, hook_arguments=(str(hangs),))
    wait_for(hangs.exists)
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert command.err.endswith(f" starts again; rollout.reward: {named(sleeps)} was running\n")


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


@pytest.mark.slow
def test_a_thread_that_hangs_does_not_keep_a_complete_run(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **REWARDED | {"rollout.reward": named(leaves_a_thread), "train.steps": 1})
    command = Command("distill", tmp_path / "run.yaml")
    assert command.wait() == 0
    assert command.err.startswith(
        "warning: the process ends, although these threads have not ended by themselves: 'checker'"
    )
    assert (tmp_path / "out" / "model").is_dir()
