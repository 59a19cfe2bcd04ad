"""Runs whose rewards and environments run in worker processes (`rollout.workers`): results, faults, nothing left."""

import json
import os
import signal
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, contents, run, wait_for
from kit.signal_hooks import signal_at
from kit.user_functions import Remembers, are_gone, counts, named, workers_of

from stillhouse.rollout.sampler import EndOfCompletion

REWARDED = {"objective.loss": "policy_gradient + reverse_kl", "data.eval": 0, "rollout.reward": named(counts)}
TURNS = {"rollout.environment": named(Remembers), "rollout.stop": ["e", "a", "i"]}
#: the environment's object gives a part of the reward
SCORED = TURNS | {"rollout.reward": f"{named(counts)} + 0.5*environment"}
FUNCTIONS = """
import os, time
from pathlib import Path

def pause(prompt, completion, record):
    time.sleep(len(completion) % 3 / 20)
    return float(len(completion))

def warm(prompt, completion, record):
    if Path("warm").exists():
        Path("hangs").touch()
        time.sleep(1000)
    return float(len(completion))

def marks(prompt, completion, record):
    Path("called").touch()
    return float(len(completion))

def replies(prompt, completion, record):
    Path("called").touch()
    return " no!"

class Leaves:
    def reset(self, prompt, record): ...
    def step(self, turn): return None
    def close(self):
        if not Path("forgiven").exists():
            time.sleep(0.5)  # so that all samples have ended
            raise OSError("the door is locked")

def hangs(prompt, completion, record): time.sleep(1000)
def dies(prompt, completion, record): os._exit(0)
def nan(prompt, completion, record): return float("nan")
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (REWARDED | SCORED | {"rollout.schedule": "async", "rollout.max_staleness": 4}, 1),
        slow(REWARDED | {"rollout.reward": "worker_rewards:pause", "rollout.schedule": "async"}, 1),
        slow(REWARDED | SCORED | {"rollout.schedule": "one_step_off", "parallel.fsdp": 2, "rollout.max_turns": 2}, 2),
    ],
)
@pytest.mark.usefixtures("functions")
def test_a_run_does_not_depend_on_its_workers(tmp_path: Path, settings: dict[str, Any], processes: int) -> None:
    write_on_policy_run(tmp_path, **settings, **{"train.steps": 5, "rollout.samples": "all"})
    for workers in (0, 1, 3):
        out = tmp_path / str(workers)
        run_ranks(processes, "distill", tmp_path / "run.yaml", f"rollout.workers={workers}", f"out={out}")
        assert rollout_figures(out) == rollout_figures(tmp_path / "0")
        assert contents(out / "model") == contents(tmp_path / "0" / "model")
    samples = [json.loads(line) for line in (tmp_path / "0" / "samples.jsonl").read_text().splitlines()]
    # two tokens may be one character
    samples = [line for line in samples if "\ufffd" * 2 not in "".join(token["text"] for token in line["tokens"])]
    if "environment" in settings["rollout.reward"]:
        assert {len(turns_of(sample)) for sample in samples} >= {1, 2}
        for sample in samples:
            remembers = Remembers()
            remembers.reset(sample["prompt"], {})
            for turn in turns_of(sample):
                remembers.step(turn)
            assert sample["reward_parts"]["environment"] == remembers.reward()
            assert sample["reward"] == sample["reward_parts"]["counts"] + 0.5 * remembers.reward()


def turns_of(sample: dict[str, Any]) -> list[str]:
    """The texts of the student's turns in a line of samples.jsonl, without one that was cut."""
    runs = [(target, list(tokens)) for target, tokens in groupby(sample["tokens"], lambda token: token["target"])]
    texts = ["".join(token["text"] for token in tokens).removesuffix("</s>") for target, tokens in runs if target]
    # a turn may also end where there is no room for a reply
    has_end = any(end in sample["tokens"][-1]["text"] for end in ("</s>", "e", "a", "i"))
    return texts[:-1] if sample["finish"] == "length" and runs[-1][0] and not has_end else texts


def write_until_called(marker: Path) -> None:
    """A hook of a run: when a completion has ended and another of its batch has not, wait for the first call."""
    original = EndOfCompletion.__call__

    def wrapped(self: EndOfCompletion, *arguments: Any, **options: Any) -> Any:
        has_ended_B = original(self, *arguments, **options)
        if has_ended_B.any() and not has_ended_B.all():
            wait_for(marker.exists)
        return has_ended_B

    EndOfCompletion.__call__ = wrapped  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "functions_of_run",
    [{"rollout.reward": "worker_rewards:marks"}, slow({"rollout.environment": "worker_rewards:replies"})],
)
@pytest.mark.usefixtures("functions")
def test_calls_begin_while_other_completions_are_written(tmp_path: Path, functions_of_run: dict[str, Any]) -> None:
    settings = REWARDED | {"rollout.stop": ["e", "a", "i"], "train.steps": 2} | functions_of_run
    write_on_policy_run(tmp_path, **settings)
    arguments = ("distill", tmp_path / "run.yaml")
    run(*arguments, f"out={tmp_path / 'after'}")
    (marker := tmp_path / "called").unlink()
    command = Command(*arguments, "rollout.workers=2", hook=write_until_called, hook_arguments=(marker,))
    assert command.wait() == 0, command.err
    assert rollout_figures(tmp_path / "out") == rollout_figures(tmp_path / "after")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "after" / "model")


@pytest.mark.parametrize(
    ("function", "words", "processes"),
    [
        ("hangs", "does not return within 0.5 s, the value of rollout.worker_timeout, for the completion", 1),
        slow("hangs", "does not return within 0.5 s, the value of rollout.worker_timeout, for the completion", 2),
        slow("dies", "ends its process with exit code 0 for the completion", 2),
        slow("nan", "gives nan for the completion", 2),
    ],
)
@pytest.mark.usefixtures("functions")
def test_a_reward_that_hangs_ends_or_gives_nan(tmp_path: Path, function: str, words: str, processes: int) -> None:
    settings = {"rollout.reward": f"worker_rewards:{function}", "rollout.workers": 2, "rollout.worker_timeout": 0.5}
    write_on_policy_run(tmp_path, **REWARDED | settings)
    ranks = Ranks(processes, "distill", tmp_path / "run.yaml")
    assert ranks.wait() == [1] * processes, ranks.texts
    assert f"error: rollout.reward: worker_rewards:{function} {words}" in ranks[0].err
    assert "train.jsonl:" in ranks[0].err
    assert "Traceback" not in ranks.err


@pytest.mark.usefixtures("functions")
def test_an_error_of_the_last_close_ends_the_run_after_its_checkpoint(tmp_path: Path) -> None:
    settings = {"rollout.environment": "worker_rewards:Leaves", "rollout.workers": 2, "train.steps": 1}
    write_on_policy_run(tmp_path, **REWARDED | {"rollout.stop": ["e", "a", "i"]} | settings)
    message = "error: rollout.environment: worker_rewards:Leaves.close raises OSError: the door is locked"
    assert message in run("distill", tmp_path / "run.yaml", code=1).err
    (tmp_path / "forgiven").touch()
    assert "resuming from" in run("distill", tmp_path / "run.yaml").out
    assert (tmp_path / "out" / "model").is_dir()


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_is_the_same_and_so_is_one_that_is_killed_itself(tmp_path: Path) -> None:
    settings = {"rollout.workers": 2, "rollout.schedule": "one_step_off", "checkpoint.every": 2, "train.steps": 8}
    write_on_policy_run(tmp_path, **REWARDED | SCORED | settings)
    arguments = ("distill", tmp_path / "run.yaml")
    run(*arguments, f"out={tmp_path / 'undisturbed'}")
    command = Command(*arguments, hook=signal_at, hook_arguments=(5, signal.SIGKILL))
    assert command.process.pid is not None
    killed, workers = 0, list[int]()
    while command.process.exitcode is None:
        workers = workers_of(command.process.pid) or workers
        if killed < 3 and workers:
            with suppress(ProcessLookupError):  # the list may be that of the look before
                os.kill(workers[0], signal.SIGKILL)
                killed += 1
        time.sleep(0.3)
    assert command.wait() == -signal.SIGKILL, command.err
    assert killed == 3
    wait_for(lambda: are_gone(workers))
    run(*arguments)
    assert rollout_figures(tmp_path / "out") == rollout_figures(tmp_path / "undisturbed")
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "undisturbed" / "model")


@pytest.mark.parametrize("processes", [1, slow(2)])
@pytest.mark.usefixtures("functions")
def test_a_signal_ends_a_run_whose_reward_hangs_in_a_worker(tmp_path: Path, processes: int) -> None:
    """The checkpoint has samples without rewards, which the next start requests again."""
    settings = {"rollout.workers": 2, "rollout.schedule": "one_step_off", "checkpoint.every": 0}
    reward = {"rollout.reward": "worker_rewards:warm + environment", "parallel.fsdp": processes}
    write_on_policy_run(tmp_path, **REWARDED | TURNS | settings | reward)
    arguments, out = ("distill", tmp_path / "run.yaml"), tmp_path / "out"
    run_ranks(processes, *arguments, f"out={tmp_path / 'undisturbed'}")
    ranks = Ranks(processes, *arguments)
    wait_for(lambda: len(rollout_figures(out)) >= 2 if (out / "metrics.jsonl").exists() else False)
    (tmp_path / "warm").touch()
    wait_for((tmp_path / "hangs").exists)
    pid = ranks[0].process.pid
    assert pid is not None
    workers = workers_of(pid)
    assert len(workers) == 2
    ranks.send(signal.SIGTERM)
    started = time.monotonic()
    assert ranks.wait(30, grace=30) == [128 + signal.SIGTERM] * processes, ranks.texts
    assert time.monotonic() - started < 15
    assert "Traceback" not in ranks.err
    assert are_gone(workers)
    (tmp_path / "warm").unlink()
    run_ranks(processes, *arguments)
    assert rollout_figures(out) == rollout_figures(tmp_path / "undisturbed")
    assert contents(out / "model") == contents(tmp_path / "undisturbed" / "model")
