"""What a resumed on-policy run depends on: states and sources of functions, and where a completion ends."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from kit import slow
from kit.on_policy_runs import rollout_figures, write_module, write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, contents, edit_json, metrics, refused, refused_runs, run, write_records, write_run
from kit.signal_hooks import kill_at, signal_at

from stillhouse.output.progress import read_state, write_state
from stillhouse.run.run import prepare
from stillhouse.user_code.function_state import FunctionStates, has_state, state_text
from stillhouse.user_code.functions import REWARD, UserFunction, UserFunctionError, load_function

HOOKS = """
import os
import signal
import time

import numpy as np
import torch

class Plain:
    def __init__(self):
        self.lengths = []

    def __call__(self, prompt, completion, record):
        self.lengths.append(len(completion))
        return len(completion) - sum(self.lengths) / len(self.lengths)

class Stateful(Plain):
    def state_dict(self):
        return {"lengths": self.lengths, "none": None, "smallest": float("-inf")}

    def load_state_dict(self, state):
        assert state["none"] is None and state["smallest"] == float("-inf")
        self.lengths = state["lengths"]

class Replies(Stateful):
    def __call__(self, prompt, completion, record):
        super().__call__(prompt, completion, record)
        return f" {len(self.lengths) % 7}!" if completion.count("!") < 2 else None

class Wrong(Stateful):
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

class Late(Stateful):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def state_dict(self):
        return {"lengths": tuple(self.lengths) if len(self.lengths) >= self.calls else []}

class Hanging(Late):
    def state_dict(self):
        if len(self.lengths) >= self.calls:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return {}

class Failing(Stateful):
    def __call__(self, prompt, completion, record):
        if len(self.lengths) == 21 and os.path.exists("fail"):
            raise RuntimeError("fails")
        return super().__call__(prompt, completion, record)

class Count(Stateful):
    def __call__(self, context):
        self.lengths.append(0)
        return {"count": len(self.lengths)}

class Half(Plain):
    def state_dict(self):
        return {}

class Game:
    played = 0

    def reset(self, prompt, record):
        type(self).played += 1

    def step(self, turn):
        return None

    @classmethod
    def state_dict(cls):
        return cls.played

    @classmethod
    def load_state_dict(cls, state):
        cls.played = state

class Model(torch.nn.Linear):
    def forward(self, prompt, completion, record):
        return 0.0

class NamedModel(Model):
    def state_dict(self, *arguments, **options):
        return super().state_dict(*arguments, **options)

def length(prompt, completion, record):
    return float(len(completion))

plain, stateful, replies, half = Plain(), Stateful(), Replies(), Half()
early, late, hanging, failing, count = Late(1), Late(20), Hanging(20), Failing(), Count()
model, named_model = Model(3, 2), NamedModel(3, 2)
numpys = Wrong([np.float64(0.1), np.float64("nan"), True, 3])
tuples, numbers, tensors = Wrong({"a": (1, 2)}), Wrong({1: 2}), Wrong([torch.zeros(2)])
deep = []
deep.append(deep)
endless, long, digits, method = Wrong(deep), Wrong("a" * 2**24), Wrong(10**5000), stateful.__call__
"""
#: advantages that depend on the size of rewards
ON_POLICY = {
    "objective.loss": "policy_gradient",
    "teacher": False,
    "rollout.advantage": "centered",
    "checkpoint.every": 2,
}


TURNS = {"rollout.environment": "hooks:replies", "rollout.stop": ["e", "a"]}


@pytest.fixture(autouse=True)
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "hooks", HOOKS)


def finished(processes: int, *arguments: Any, code: int = 0, **options: Any) -> str:
    """Run a command to its end in new processes, and return what they print. A single process has no launcher."""
    if processes == 1:
        command = Command(*arguments, **options)
        assert command.wait() == code, command.err
        return command.out + command.err
    ranks = Ranks(processes, *arguments, **options)
    assert set(ranks.wait()) == {code}, ranks.texts
    return ranks.texts


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (1, {"rollout.reward": "hooks:stateful"}),
        slow(1, {"rollout.reward": "hooks:plain"}),
        slow(1, {"rollout.reward": "hooks:stateful + 0.5*hooks:length", "rollout.schedule": "one_step_off"} | TURNS),
        slow(2, {"rollout.reward": "hooks:stateful", "parallel.fsdp": 2}),
    ],
    ids=str,
)
def test_a_killed_run_keeps_the_states_of_functions(tmp_path: Path, processes: int, settings: dict[str, Any]) -> None:
    """A reward with a state that it does not offer is another one after a resume, and the run has said so."""
    write_on_policy_run(tmp_path, **ON_POLICY | settings)
    arguments, out = ("distill", tmp_path / "run.yaml"), tmp_path / "out"
    shown = finished(processes, *arguments, f"out={tmp_path / 'undisturbed'}")
    is_kept = "plain" not in settings["rollout.reward"]
    compared = r"warning: rollout\.reward: hooks:plain gives \S+ and later \S+ for the same arguments"
    assert len(re.findall(compared, shown)) == (not is_kept)
    assert shown.count("for the same arguments") == (not is_kept)
    hook = {"hook": signal_at, "hook_arguments": (3, signal.SIGKILL)}
    if processes == 1:
        assert Command(*arguments, **hook).wait() == -signal.SIGKILL
    else:
        assert -signal.SIGKILL in Ranks(processes, *arguments, **hook).wait(grace=2)
    shown = finished(processes, *arguments)
    assert "resuming from" in shown
    assert "for the same arguments" not in shown  # the calls of a resumed run are those of the undisturbed one
    assert "the source of" not in shown
    assert (contents(out / "model") == contents(tmp_path / "undisturbed" / "model")) == is_kept
    assert (rollout_figures(out) == rollout_figures(tmp_path / "undisturbed")) == is_kept


def test_functions_of_evaluations_keep_their_state(tmp_path: Path) -> None:
    """Also in a run without completions: a metric of theirs may decide which checkpoint is the best."""
    write_records(tmp_path / "prompts.jsonl", [{"prompt": "Two and two is"}])
    prompts = {"data": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 3, "reward": "hooks:stateful"}
    settings = {"train.steps": 4, "eval.every": 1, "checkpoint.every": 2}
    write_run(tmp_path, **settings, **{"eval.callbacks": ["hooks:count"], "eval.prompts": prompts})
    kill_at(3, tmp_path / "out", tmp_path / "run.yaml")
    assert "resuming from" in finished(1, "distill", tmp_path / "run.yaml")
    evaluations = [line for line in metrics(tmp_path / "out") if "eval/count" in line]
    assert [line["eval/count"] for line in evaluations] == [1, 2, 3, 4, 5]
    functions = read_state(tmp_path / "out" / "checkpoints" / "step-00000004").progress.functions
    lengths = json.loads(functions["eval.prompts.reward: hooks:stateful"])["lengths"]
    means = [length - sum(lengths[: number + 1]) / (number + 1) for number, length in enumerate(lengths)]
    assert [line["eval/prompts/reward"] for line in evaluations] == pytest.approx(means)


@pytest.mark.slow
def test_calls_of_a_failed_step_are_not_in_the_state(tmp_path: Path) -> None:
    """They are made again, in the order of an undisturbed run."""
    settings = {"rollout.reward": "hooks:failing", "rollout.schedule": "one_step_off"}
    write_on_policy_run(tmp_path, **ON_POLICY | settings)
    arguments, fail = ("distill", tmp_path / "run.yaml"), tmp_path / "fail"
    finished(1, *arguments, f"out={tmp_path / 'undisturbed'}")
    fail.touch()
    assert "checkpoints/step-00000001; correct the cause" in finished(1, *arguments, code=1)
    fail.unlink()
    assert "resuming from" in finished(1, *arguments)
    assert contents(tmp_path / "out" / "model") == contents(tmp_path / "undisturbed" / "model")


@pytest.mark.parametrize(
    ("processes", "reward", "problem", "saved"),
    [
        (1, "early", "types that JSON does not have", []),  # in the first step
        slow(2, "late", "types that JSON does not have", ["step-00000002"]),
        slow(2, "hanging", "has not returned 5 s after a signal", ["step-00000002"]),
    ],
)
def test_a_state_that_cannot_be_saved_later_keeps_the_last_checkpoint(
    tmp_path: Path, processes: int, reward: str, problem: str, saved: list[str]
) -> None:
    settings = {"rollout.reward": f"hooks:{reward}"} | ({"parallel.fsdp": processes} if processes > 1 else {})
    write_on_policy_run(tmp_path, **ON_POLICY | settings)
    shown = finished(processes, "distill", tmp_path / "run.yaml", code=1)
    error = rf"rollout\.reward: hooks:{reward}\.state_dict .*{problem}.*; no checkpoint can be written without this"
    assert len(re.findall(error, shown)) == processes
    assert "Traceback" not in shown
    assert [path.name for path in (tmp_path / "out").glob("checkpoints/step-*")] == saved


@pytest.mark.slow
def test_a_changed_source_of_a_reward_is_said(tmp_path: Path) -> None:
    write_on_policy_run(tmp_path, **ON_POLICY, **{"rollout.reward": "hooks:stateful"})
    kill_at(3, tmp_path / "out", tmp_path / "run.yaml")
    (tmp_path / "hooks.py").write_text(HOOKS.replace("Stateful()", "Plain()"))
    shown = finished(1, "distill", tmp_path / "run.yaml")
    assert "warning: the source of hooks has changed since the checkpoint was written" in shown
    assert "warning: rollout.reward: hooks:stateful no longer has state_dict and load_state_dict" in shown


@pytest.mark.parametrize(("settings", "key", "text"), refused_runs("state of functions"))
def test_a_state_that_cannot_be_kept(tmp_path: Path, settings: dict[str, Any], key: str, text: str) -> None:
    settings = ON_POLICY | {"rollout.reward": "hooks:stateful"} | settings
    with refused(key, text):
        prepare(write_on_policy_run(tmp_path, **settings), announce=False)


def test_the_object_of_a_method_and_the_class_of_an_environment_have_a_state() -> None:
    states = {}
    for name in ("method", "length", "model", "named_model", "numpys"):
        function = load_function(REWARD, f"hooks:{name}")
        states[name] = state_text(function) if has_state(function) else None
    expected = {"lengths": [], "none": None, "smallest": -float("inf")}
    assert json.loads(str(states.pop("method"))) == expected
    assert states == {"length": None, "model": None, "named_model": None, "numpys": "[0.1, NaN, true, 3]"}
    game = load_function("rollout.environment", "hooks:Game")
    assert state_text(game) == "0"
    FunctionStates([game]).load({"rollout.environment: hooks:Game": "5"}, {}, print)
    assert state_text(game) == "5"


def test_sources_are_those_of_modules_that_are_not_installed() -> None:
    """Also if a virtual environment sees the packages of another Python."""
    names = FunctionStates([load_function(REWARD, "hooks:length")]).sources.keys()
    assert "hooks" in names
    assert not {"torch", "numpy", "transformers", "yaml", "json"} & {name.partition(".")[0] for name in names}


def test_a_function_that_does_not_load_its_state_is_named() -> None:
    def fail(_: object) -> None:
        raise KeyError("lengths")

    function = load_function(REWARD, "hooks:stateful").function
    function.load_state_dict = fail  # type: ignore[attr-defined]
    states = FunctionStates([UserFunction(REWARD, "hooks:stateful", function)])
    with pytest.raises(UserFunctionError, match=r"rollout\.reward: hooks:stateful\.load_state_dict raises KeyError"):
        states.load({"rollout.reward: hooks:stateful": "{}"}, {}, print)


def changed_ends(student: Path) -> None:
    edit_json(student / "generation_config.json", eos_token_id=[2, 9])


def changed_decoder(student: Path) -> None:
    path = student / "tokenizer.json"
    before = json.loads(path.read_text())["decoder"]
    edit_json(path, decoder={"type": "Sequence", "decoders": [before, {"type": "Fuse"}]})


def changed_template(student: Path) -> None:
    (student / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")


OF_ENDS = "the ids that end a completion (eos_token_id in generation_config.json, or the tokenizer's eos_"
OF_TEXTS = "the text of ids and conversations (the decoder, the added tokens or the chat template of the"
REFUSED = {changed_ends: OF_ENDS, changed_decoder: OF_TEXTS, changed_template: OF_TEXTS}


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_what_decides_completions_does_not_change_behind_a_resume(tmp_path: Path, processes: int) -> None:
    write_on_policy_run(tmp_path, **{"train.steps": 2})
    arguments, out = ("distill", tmp_path / "run.yaml"), tmp_path / "out"
    run_ranks(2, *arguments) if processes == 2 else run(*arguments)
    shutil.rmtree(out / "model")
    kept = shutil.copytree(tmp_path / "student", tmp_path / "kept")
    for change, words in REFUSED.items():
        change(tmp_path / "student")
        commands = (arguments, ("check", *arguments[1:])) if processes == 1 else (arguments,)
        for command in commands:
            shown = run(*command, code=1).err if processes == 1 else finished(2, *command, code=1)
            assert words in shown
            assert "restore the files, or choose another folder as out" in shown
            assert ("changed from 2 to 2, 9 since" in shown) == (change is changed_ends)
        shutil.rmtree(tmp_path / "student")
        shutil.copytree(kept, tmp_path / "student")
    changed_ends(tmp_path / "student")
    state_of_earlier_version(out / "checkpoints" / "step-00000002")
    assert "resuming from" in finished(processes, *arguments)


def state_of_earlier_version(checkpoint: Path) -> None:
    """Remove what earlier versions did not write."""
    state = read_state(checkpoint)
    for name in ("end_ids", "text"):
        del state.progress.models[name]
    write_state(checkpoint, state)


def test_a_run_without_completions_takes_other_end_ids(tmp_path: Path) -> None:
    write_run(tmp_path, **{"train.steps": 2})
    run("distill", tmp_path / "run.yaml")
    shutil.rmtree(tmp_path / "out" / "model")
    changed_ends(tmp_path / "student")
    assert "resuming from" in run("distill", tmp_path / "run.yaml").out
