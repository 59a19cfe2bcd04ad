"""Evaluations for which the student completes prompts: eval.callbacks, eval.samples and eval.prompts."""

import os
import shutil
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from kit import slow
from kit.on_policy_runs import write_on_policy_run
from kit.ranks import Ranks, run_ranks
from kit.runs import Command, json_lines, metrics, refused_changes, run, session_of, write_records, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from stillhouse.config import ConfigError
from stillhouse.loops.greedy_evaluation import PROMPT_TOKENS, EvaluationContext, checked_metrics, choose_prompts
from stillhouse.output.records import EvalSample
from stillhouse.run.run import distill


def broken(context: EvaluationContext) -> dict[str, float]:
    return {"perplexity": float("nan") if context.step else 1.0}


@pytest.mark.slow
def test_a_number_that_is_not_finite_stops_the_run_on_all_ranks(tmp_path: Path) -> None:
    write_run(tmp_path, **{"eval.callbacks": [f"{__name__}:broken"]})
    problem = "eval.callbacks: test_evaluations:broken gives nan for 'perplexity': expected a finite number; the run"
    for processes, name in ((1, "out"), (2, "two")):
        ranks = Ranks(processes, "distill", tmp_path / "run.yaml", f"out={tmp_path / name}")
        assert ranks.wait() == [1] * processes, ranks.texts
        (saved,) = (tmp_path / name / "checkpoints").iterdir()
        line = f"{problem} has stopped after a checkpoint: {saved}; correct the cause, and the same command "
        line += "continues\n"
        assert [rank.err for rank in ranks] == [f"error: {line}", f"error on rank 1: {line}"][:processes]


def quality(context: EvaluationContext) -> dict[str, float]:
    return {"quality": -abs(context.step - 2.0)}


@pytest.mark.slow
@pytest.mark.parametrize(("greater", "best"), [("true", "step-00000002"), ("false", "step-00000006")])
def test_its_metric_can_choose_the_best_checkpoint(tmp_path: Path, greater: str, best: str) -> None:
    settings = {"eval.callbacks": [f"{__name__}:quality"], "checkpoint.every": 1, "checkpoint.keep": 1}
    write_run(tmp_path, **settings)
    chosen = ["checkpoint.best=eval/quality", f"checkpoint.greater_is_better={greater}"]
    run("distill", tmp_path / "run.yaml", *chosen)
    kept = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert kept == {best, "step-00000006"}
    exported = run("export", tmp_path / "out", "--step", "best", "--out", tmp_path / "exported")
    assert best.lstrip("step-0") in exported.out
    others = [f"out={tmp_path / 'other'}", "checkpoint.best=eval/speed", "checkpoint.greater_is_better=true"]
    failed = run("distill", tmp_path / "run.yaml", *others, code=2)
    assert "checkpoint.best: got eval/speed, but the evaluation of step 0 has only eval/cross_entropy" in failed.err


@pytest.mark.parametrize(("returned", "text"), refused_changes("metrics of a callback"))
def test_what_is_no_metrics_is_refused(returned: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^eval.callbacks: m:f .*{text}"):
        checked_metrics("eval.callbacks: m:f", eval(returned), {"eval/cross_entropy"})


SETTINGS = {"eval.samples": 3, "eval.task_tokens": 7, "eval.every": 2, "checkpoint.every": 2, "checkpoint.keep": 9}


def samples(out: Path) -> list[EvalSample]:
    return [EvalSample(**line) for line in json_lines(out / "eval_samples.jsonl")]


def test_completions_are_the_greedy_ones_of_the_saved_students(tmp_path: Path) -> None:
    write_run(tmp_path, **SETTINGS)
    run("distill", tmp_path / "run.yaml")
    shown = samples(tmp_path / "out")
    expected = [(step, number) for step in (0, 2, 4, 6) for number in range(3)]
    assert [(sample.step, sample.number) for sample in shown] == expected
    session = session_of(tmp_path, **SETTINGS)
    assert session.data.evaluation is not None
    documents = session.data.evaluation.documents
    chosen = choose_prompts(documents, 3)
    folders = {0: tmp_path / "student", 6: tmp_path / "out" / "model"}
    models = {step: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for step, path in folders.items()}
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    for sample in shown:
        prompt = chosen[sample.number]
        assert sample.source == documents.sources[prompt.document]
        assert sample.prompt == session.data.tokenizer.decode(prompt.prompt_N)
        assert sample.reference == session.data.tokenizer.decode(prompt.reference_N[:7])
        if sample.step in models:
            ids = torch.from_numpy(prompt.prompt_N.astype(np.int64))[None]
            generated = models[sample.step].generate(ids, attention_mask=torch.ones_like(ids), **options)
            assert session.data.tokenizer.decode(generated[0, ids.shape[1] :]) == sample.completion
    assert shown[0].completion != shown[-3].completion


def text_number(context: EvaluationContext) -> dict[str, float]:
    """A callback, whose texts rank 0 alone completes. Other completions have another number."""
    return {"callback": float(crc32("".join(context.generate(["the first text", "another"])).encode()))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_two_processes_show_and_measure_as_one_does(tmp_path: Path, layout: str) -> None:
    """The samples, and the metrics of tasks and callbacks."""
    write_run(tmp_path, **SETTINGS, **{"eval.callbacks": [f"{__name__}:text_number"], "eval.tasks": ["sums(2:3)"]})
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'one'}")
    run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / 'two'}", layout)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    keys = ("eval/callback", "eval/exact_match/sums", "eval/tasks_truncated")
    lines = [[line for line in metrics(tmp_path / out) if "eval/tokens" in line] for out in ("one", "two")]
    one, two = ([[line[key] for key in keys] for line in of_run] for of_run in lines)
    assert two == one
    assert one[0][0] != one[-1][0], "the completions of a trained student are those of the untrained one"


@pytest.mark.slow
def test_a_resumed_run_has_each_evaluation_once(tmp_path: Path) -> None:
    write_run(tmp_path, **SETTINGS)
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'undisturbed'}")
    assert Command("distill", tmp_path / "run.yaml", hook=end_after_an_evaluation).wait() == 9
    assert {sample.step for sample in samples(tmp_path / "out")} == {0, 2, 4}
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir()) == ["step-00000002"]
    run("distill", tmp_path / "run.yaml")
    assert samples(tmp_path / "out") == samples(tmp_path / "undisturbed")


def end_after_an_evaluation() -> None:
    """Ends the process after the evaluation of step 4, before its checkpoint."""
    from stillhouse.loops.training import Training

    save = Training.save

    def ending(self: Training) -> Path:
        if self.progress.step == 4:
            os._exit(9)
        return save(self)

    Training.save = ending  # type: ignore[method-assign]


def test_prompts_are_those_of_the_data_or_beginnings_of_texts(tmp_path: Path) -> None:
    write_run(tmp_path)
    texts = [{"text": f"Number {number} " * (number + 1)} for number in range(8)]
    answers = [{"prompt": f"Two and {number} is", "completion": f" {number + 2}, and so on."} for number in range(4)]
    sets = {"texts": write_records(tmp_path / "texts.jsonl", texts), "answers": tmp_path / "answers.jsonl"}
    write_records(sets["answers"], answers)
    session = session_of(tmp_path, **{"data.eval": {name: str(path) for name, path in sets.items()}})
    assert session.data.evaluation is not None
    documents = session.data.evaluation.documents
    chosen = choose_prompts(documents, 99)
    assert sorted(prompt.document for prompt in chosen) == list(range(len(documents)))
    assert [prompt.document for prompt in choose_prompts(documents, 3)] == [prompt.document for prompt in chosen[:3]]
    for prompt in chosen:
        ids_N, targets_N = documents.tokens(prompt.document), documents.targets(prompt.document)
        assert np.array_equal(np.concatenate([prompt.prompt_N, prompt.reference_N]), ids_N)
        if targets_N[1]:
            assert len(prompt.prompt_N) == min(PROMPT_TOKENS, len(ids_N) // 2)
        else:
            assert not targets_N[: len(prompt.prompt_N)].any()
            assert targets_N[len(prompt.prompt_N)]


def test_several_sets_take_turns(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "few.jsonl").write_text('{"text": "a small set"}\n{"text": "of two texts"}\n')
    sets = {"many": str(tmp_path / "eval.jsonl"), "few": str(tmp_path / "few.jsonl")}
    session = session_of(tmp_path, **{"data.eval": sets})
    assert session.data.evaluation is not None
    documents = session.data.evaluation.documents
    names = [
        Path(documents.sources[prompt.document]).name.partition(".")[0] for prompt in choose_prompts(documents, 6)
    ]
    assert names == ["eval", "few", "eval", "few", "eval", "eval"]


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
    records = json_lines(tmp_path / "train.jsonl")[:3]
    write_records(tmp_path / "held_out.jsonl", [*records, {"prompt": "Another one is", "completion": " it."}])
    prompts = f"eval.prompts={{data: {tmp_path / 'held_out.jsonl'}, max_new_tokens: {NEW_TOKENS}}}"
    shown = run("check", tmp_path / "run.yaml", *same, prompts).out
    assert "eval.prompts.data: 3 of the 4 held-out prompts are also in the training data" in shown
    nothing = "has the same files as student.model: the divergence between a model and itself is 0"
    assert nothing in shown
    assert "gradient norm 0" in shown
    assert nothing not in run("check", tmp_path / "run.yaml", *same, "objective.loss=reverse_kl - 0.01*entropy").out


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
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        whole = models[0].generate(ids, attention_mask=torch.ones_like(ids), **options)
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
