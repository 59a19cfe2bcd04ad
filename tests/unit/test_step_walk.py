"""The ways of a micro-batch and of a sample from the loop on are as short as docs/architecture.md says."""

import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import Ranks
from kit.runs import write_run

HEAD = ["TeacherStudentPair.forward", "Decoder.forward", "Head.forward", "StepLoss.__call__", "linear_objective"]


def walk(folder: Path, **settings: Any) -> list[str]:
    """Return the functions that are running when the objective of a run's first step is called, the loop first.

    settings: of the run (see `write_run`); it has as many processes as its layout.
    """
    config = write_run(folder, **{"train.steps": 1, "data.eval": 0, "checkpoint.best": None, **settings})
    ranks = Ranks(config.parallel.pipeline, "distill", folder / "run.yaml", hook=record, hook_arguments=(folder,))
    assert not any(ranks.wait()), ranks.texts
    return json.loads((folder / "walk.json").read_text())


def record(folder: Path) -> None:
    """Write the running functions to a file whenever the objective of a training step is called."""
    from stillhouse.engine import loss

    objective = loss.linear_objective

    def recorded(*arguments: Any, **options: Any) -> Any:
        names = running(sys._getframe(1))
        if "train" in names[0]:
            (folder / "walk.json").write_text(json.dumps([*names, objective.__qualname__]))
        return objective(*arguments, **options)

    loss.linear_objective = recorded


@dataclass(frozen=True)
class OnPolicyWalk:
    """The way of the samples of a step.

    token, reward: the functions that are running when the first token is sampled, and when the first call of a reward
        leaves for the user's function.
    switches: how often the step's samples change from one package to another, by a call or its return. What follows
        the call of the user's function is not counted; with rollout.workers, it is in another process.
    closures: functions that one package makes and another one calls.
    """

    token: list[str]
    reward: list[str]
    switches: int
    closures: list[str]


def walk_on_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> OnPolicyWalk:
    """Walk the first step of a run with 4 prompts of 2 samples, which this process generates and rewards."""
    (folder / "walked_rewards.py").write_text("def length(prompt, completion, record):\n    return len(completion)\n")
    monkeypatch.chdir(folder)
    settings = {"objective.loss": "reverse_kl + policy_gradient", "rollout.reward": "walked_rewards:length"}
    counts = {"rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2, "train.steps": 1}
    write_on_policy_run(folder, **settings, **counts, **{"data.eval": 0, "checkpoint.best": None})
    ranks = Ranks(1, "distill", folder / "run.yaml", hook=record_samples, hook_arguments=(folder,))
    assert not any(ranks.wait()), ranks.texts
    return OnPolicyWalk(**json.loads((folder / "walk.json").read_text()))


def record_samples(folder: Path) -> None:
    """Write the way of the samples to a file when the loop has taken them."""
    from stillhouse.rollout.rollout import Rollout
    from stillhouse.rollout.sampler import TokenSampler
    from stillhouse.user_code.function_calls import FunctionCalls

    stacks: dict[str, list[str]] = {}
    switches, closures = Counter[str](), set[str]()
    take, sample, request = Rollout.take, TokenSampler.__call__, FunctionCalls.request

    def profile(frame: FrameType, event: str, _: Any) -> None:
        module, caller = frame.f_globals.get("__name__", ""), frame.f_back
        while caller is not None and not caller.f_globals.get("__name__", "").startswith("stillhouse."):
            caller = caller.f_back
        if event != "call" or caller is None or not module.startswith("stillhouse."):
            return
        packages = [name.split(".")[1] for name in (caller.f_globals["__name__"], module)]
        if packages[0] != packages[1] and packages[0] != "user_code":
            switches[f"{packages[0]} -> {frame.f_code.co_qualname}"] += 1
            if "<" in frame.f_code.co_qualname:
                closures.add(frame.f_code.co_qualname)

    def taking(rollout: Rollout, *arguments: Any) -> Any:
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            return take(rollout, *arguments)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            content = {**stacks, "switches": 2 * switches.total(), "closures": sorted(closures)}
            (folder / "walk.json").write_text(json.dumps(content))
            (folder / "switches.txt").write_text("\n".join(f"{count:4} {name}" for name, count in switches.items()))

    def sampling(sampler: TokenSampler, *arguments: Any) -> Any:
        stack = [*running(sys._getframe(1)), sample.__qualname__]
        if take.__qualname__ in stack:  # no proof of the model
            stacks.setdefault("token", stack)
        return sample(sampler, *arguments)

    def requesting(calls: FunctionCalls, *arguments: Any) -> Any:
        stacks.setdefault("reward", [*running(sys._getframe(1)), request.__qualname__])
        return request(calls, *arguments)

    Rollout.take, TokenSampler.__call__ = taking, sampling  # type: ignore[method-assign]
    FunctionCalls.request = requesting  # type: ignore[method-assign]


def running(frame: FrameType | None) -> list[str]:
    """Return the names of Stillhouse's functions on the stack, from the loop's on."""
    names: list[str] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("stillhouse."):
            names.append(frame.f_code.co_qualname)
        if module.startswith("stillhouse.loops.") and frame.f_code.co_name == "train":
            break
        frame = frame.f_back
    return names[::-1]


def test_in_one_process(tmp_path: Path) -> None:
    assert walk(tmp_path) == ["train", "TorchEngine.forward_backward", *HEAD]


@pytest.mark.slow
def test_in_a_pipeline(tmp_path: Path) -> None:
    stages = ["Pipeline.forward_backward", "_Stage.forward"]
    assert walk(tmp_path, parallel={"pipeline": 2}) == ["train", "TorchEngine.forward_backward", *stages, *HEAD]


def test_the_samples_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = walk_on_policy(tmp_path, monkeypatch)
    take = ["train", "Rollout.take"]
    generate = ["InJobEngine.generate", "Generator.generate", "Generator.batch", "Generator._run"]
    score = [f"Samples.{name}" for name in ("next_requests", "receive", "_call_about", "_request_rewards")]
    assert samples.token == [*take, "InJobEngine.complete", *generate, "TokenSampler.__call__"]
    assert samples.reward == [*take, "InJobEngine.complete", *score, "RewardSum.request", "FunctionCalls.request"]
    assert samples.switches <= 60, (tmp_path / "switches.txt").read_text()
    assert samples.closures == []
