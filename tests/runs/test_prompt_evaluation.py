"""eval.prompts: the student completes held-out prompts, and the teacher scores its completions."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import slow
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import run_ranks
from kit.runs import metrics, run, write_records, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.config import ConfigError
from stillhouse.run.run import distill

NEW_TOKENS = 7
REWARD = """
def length(prompt, completion, record):
    assert prompt.endswith("is") and record["answer"] == "no"
    return float(len(completion))

class Asks:
    def reset(self, prompt, record):
        self.turns = 0

    def step(self, turn):
        self.turns += 1
        return " and" if self.turns < 4 else None

    def reward(self):
        return self.turns
"""


def settings(folder: Path, **prompts: Any) -> dict[str, Any]:
    """Settings with prompts alone; no record has a completion."""
    folder.mkdir(exist_ok=True)
    write_records(folder / "held_out.jsonl", [{"prompt": f"Three and {n} is", "answer": "no"} for n in range(5)])
    (folder / "of_eval.py").write_text(REWARD)
    of_prompts = {"data": str(folder / "held_out.jsonl"), "count": 4, "max_new_tokens": NEW_TOKENS} | prompts
    return {"eval.prompts": of_prompts, "eval.every": 2, "checkpoint.every": 2, "checkpoint.keep": 9}


def test_check_names_held_out_prompts_that_are_trained_and_a_teacher_that_is_the_student(tmp_path: Path) -> None:
    """A loss with another summand, or a student that differs, has no such warning."""
    write_on_policy_run(tmp_path, **{"objective.loss": "reverse_kl"})
    same = [f"teacher.model={tmp_path / 'student'}", "train.precision=fp32"]
    lines = (tmp_path / "train.jsonl").read_text().splitlines()[:3]
    (tmp_path / "held_out.jsonl").write_text(
        "\n".join([*lines, '{"prompt": "Another one is", "completion": " it."}']) + "\n"
    )
    prompts = f"eval.prompts={{data: {tmp_path / 'held_out.jsonl'}, max_new_tokens: {NEW_TOKENS}}}"
    shown = run("check", tmp_path / "run.yaml", *same, prompts).out
    assert "eval.prompts.data: 3 of the 4 held-out prompts are also in the training data" in shown
    nothing = "has the same files as student.model: the divergence between a model and itself is 0"
    assert nothing in shown
    assert "gradient norm 0" in shown
    shown = run("check", tmp_path / "run.yaml", *same, "objective.loss=reverse_kl - 0.01*entropy").out
    assert nothing not in shown


def evaluations(out: Path) -> dict[int, dict[str, float]]:
    lines = [line for line in metrics(out) if "eval/prompts/ended" in line]
    return {line["step"]: {k: v for k, v in line.items() if k.startswith("eval/prompts/")} for line in lines}


def expected(student: Path, teacher: Path, prompts: list[str]) -> dict[str, float]:
    """The figures from transformers' own greedy completions and from dense logits in float64."""
    tokenizer = AutoTokenizer.from_pretrained(student)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (student, teacher)]
    divergence, lengths, ends, rewards = 0.0, [], [], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        whole = models[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        completion = whole[0, ids.shape[1] :]
        lengths.append(len(completion))
        ends.append(float(completion[-1] == tokenizer.eos_token_id))
        rewards.append(len(tokenizer.decode(completion, skip_special_tokens=True)))
        rows = slice(ids.shape[1] - 1, whole.shape[1] - 1)
        log_q, log_p = (model(whole).logits[0, rows].double().log_softmax(1) for model in models)
        divergence += float((log_q.exp() * (log_q - log_p)).sum().detach())
    mean = len(prompts)
    return {
        "eval/prompts/reverse_kl": divergence / sum(lengths),
        "eval/prompts/completion_tokens": sum(lengths) / mean,
        "eval/prompts/ended": sum(ends) / mean,
        "eval/prompts/reward": sum(rewards) / mean,
    }


def test_the_figures_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first and the last student, off-policy and without held-out completions."""
    monkeypatch.chdir(tmp_path)
    options = settings(tmp_path, count=9, reward="of_eval:length")
    out = distill(write_run(tmp_path, **options, **{"data.eval": 0, "checkpoint.best": "eval/prompts/reverse_kl"}))
    found = evaluations(out)
    assert list(found) == [0, 2, 4, 6]
    prompts = [f"Three and {number} is" for number in range(5)]
    for step, student in ((0, tmp_path / "student"), (6, out / "model")):
        figures = expected(student, tmp_path / "teacher", prompts)
        assert found[step] == {key: pytest.approx(value, rel=1e-4) for key, value in figures.items()}
    assert found[0]["eval/prompts/reverse_kl"] != found[6]["eval/prompts/reverse_kl"]


@pytest.mark.parametrize("layout", [slow("parallel.tensor=2"), slow("parallel.pipeline=2")])
def test_two_processes_evaluate_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """On-policy, with sampled completions of several turns, and with two workers for the environment."""
    of_eval = settings(tmp_path, temperature=1.0, max_new_tokens=24, reward="of_eval:length + 2*environment")
    of_turns = {"rollout.environment": "of_eval:Asks", "rollout.stop": ["a", "e", "o"], "rollout.max_turns": 3}
    monkeypatch.chdir(tmp_path)
    one = distill(write_on_policy_run(tmp_path, out=str(tmp_path / "one"), **of_eval, **of_turns))
    run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / 'two'}", layout, "rollout.workers=2")
    found, two = evaluations(one), evaluations(tmp_path / "two")
    assert found[0]["eval/prompts/turns"] > 1
    assert found[0]["eval/prompts/reward/environment"] > 1
    assert list(found) == list(two) == [0, 2, 4, 6]
    for key, value in found[0].items():
        assert two[0][key] == pytest.approx(value, rel=1e-4), key


def test_the_same_prompts_and_seeds_each_time(tmp_path: Path) -> None:
    """A student that does not change gets the same figures from sampled completions, also in a run that goes on."""
    options = settings(tmp_path, temperature=0.9) | {"train.learning_rate": 1e-30, "train.steps": 4}
    out = distill(write_run(tmp_path, **options))
    found = evaluations(out)
    assert list(found) == [0, 2, 4]
    assert found[0] == found[2] == found[4]

    for ended in (out / "model", out / "checkpoints" / "step-00000004"):
        shutil.rmtree(ended)
    prompts = (tmp_path / "held_out.jsonl").read_text()
    (tmp_path / "held_out.jsonl").write_text(prompts.replace("Three", "Four"))
    with pytest.raises(ValueError, match=r"^eval\.prompts\.data: the prompts have changed since"):
        distill(write_run(tmp_path, **options))
    (tmp_path / "held_out.jsonl").write_text(prompts)
    assert evaluations(distill(write_run(tmp_path, **options))) == found


@pytest.mark.parametrize("data", [[{"text": "no prompt"}], None])
def test_data_without_prompts_is_refused_by_its_key(tmp_path: Path, data: Any) -> None:
    options = settings(tmp_path)
    (tmp_path / "held_out.jsonl").unlink()
    if data:
        write_records(tmp_path / "held_out.jsonl", data)
    config = write_run(tmp_path, **options)
    with pytest.raises(ConfigError, match=r"held_out\.jsonl") as raised:
        distill(config)
    assert raised.value.key == "eval.prompts.data"
