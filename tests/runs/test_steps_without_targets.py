"""Steps in which no token is trained: they change no weight and no state of the optimizer, and say why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import metrics, run
from safetensors.torch import load_file
from torch import Tensor

#: half of the steps train on the dataset; the completions of the others are all cut
HALF = {
    "rollout.share": 0.5,
    "rollout.prompts_per_step": 1,
    "rollout.max_new_tokens": 2,
    "rollout.truncated": "mask",
    "rollout.samples": "all",
    "train.steps": 8,
    "train.learning_rate": 1e-2,
    "train.weight_decay": 0.5,
    "checkpoint.every": 1,
    "checkpoint.keep": 100,
}
SENTENCE = (
    "has no token to train on (its completions are cut at rollout.max_new_tokens, and rollout.truncated=mask "
    "excludes such ones), and changes no weight"
)


def saved_state(out: Path, step: int) -> dict[str, Tensor]:
    """Weights, moments and averages of a checkpoint, without the states of random generators."""
    files = sorted((out / "checkpoints" / f"step-{step:08d}" / "resume").glob("*.safetensors"))
    tensors = {f"{path.name}/{name}": tensor for path in files for name, tensor in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if "random" not in name}


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (1, {}),
        (1, {"train.optimizer": "muon", "cached": True, "teachers.slow": {"student": "ema", "ema_decay": 0.5}}),
        slow(2, {"train.optimizer": "muon", "parallel.fsdp": 2}),
        slow(2, {"parallel.pipeline": 2}),
    ],
    ids=str,
)
def test_a_step_without_targets_changes_nothing(tmp_path: Path, processes: int, settings: dict[str, Any]) -> None:
    write_on_policy_run(tmp_path, **HALF | settings)
    arguments = ("distill", tmp_path / "run.yaml")
    shown = run(*arguments).out if processes == 1 else run_ranks(processes, *arguments).texts
    out = tmp_path / "out"
    lines = [line for line in metrics(out) if "rollout/share" in line]
    tokens = [0, *(line["tokens"] for line in lines)]
    empty = [step for step in range(1, 9) if tokens[step] == tokens[step - 1]]
    assert 1 < len(empty) < 8
    assert any(step - 1 not in empty for step in empty if step > 1)
    for step in range(2, 9):
        before, after = saved_state(out, step - 1), saved_state(out, step)
        same = all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()
        assert same == (step in empty), step
    assert shown.count(f"warning: step {empty[0]} {SENTENCE}") == shown.count("has no token to train on") == 1
    rates = [line["train/learning_rate"] for line in lines]
    assert rates[-1] < rates[1] == max(rates)  # the schedule goes on
    assert rates == sorted(rates, reverse=True)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == set(empty)
    assert not any(token["target"] for sample in samples for token in sample["tokens"])


def test_a_first_step_without_targets_is_no_model_against_itself(tmp_path: Path) -> None:
    settings = {"rollout.max_new_tokens": 2, "rollout.truncated": "mask", "train.steps": 2}
    write_on_policy_run(tmp_path, **settings)
    shown = run("distill", tmp_path / "run.yaml").out
    assert f"warning: step 1 {SENTENCE}" in shown
    assert "the gradient of step 1 is 0" not in shown
    checked = run("check", tmp_path / "run.yaml", f"out={tmp_path / 'checked'}").out
    assert "the first step has no token to train on (its completions are cut" in checked
    assert "all completions of a prompt have the same reward" not in checked
