"""eval.callbacks: a function of the user's own is called at each evaluation, and its metrics are checked."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.ranks import Ranks
from kit.runs import run, write_run

from stillhouse.config import ConfigError, load_config
from stillhouse.loops.callbacks import EvaluationContext, checked_metrics


def lengths(context: EvaluationContext) -> dict[str, float]:
    texts = context.generate(["the first text", "another"])
    with (context.folder / "called.jsonl").open("a") as file:
        file.write(json.dumps([context.step, texts, type(context.tokenizer).__name__]) + "\n")
    return {"texts": len(texts), "own/step": context.step}


def broken(context: EvaluationContext) -> dict[str, float]:
    return {"perplexity": float("nan") if context.step else 1.0}


@pytest.mark.slow
def test_each_evaluation_calls_it_and_logs_what_it_gives(tmp_path: Path) -> None:
    write_run(tmp_path, **{"eval.callbacks": [f"{__name__}:lengths"], "eval.task_tokens": 4})
    run("distill", tmp_path / "run.yaml")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/cross_entropy" in line]
    assert len(evaluations) > 1
    assert [line["eval/own/step"] for line in evaluations] == [line["step"] for line in evaluations]
    assert {line["eval/texts"] for line in evaluations} == {2}
    called = [json.loads(line) for line in (tmp_path / "out" / "called.jsonl").read_text().splitlines()]
    assert [step for step, *_ in called] == [line["step"] for line in evaluations]
    assert called[0][1] != called[-1][1], "the completions of a trained student are those of the untrained one"


@pytest.mark.slow
def test_a_number_that_is_not_finite_stops_the_run_on_all_ranks(tmp_path: Path) -> None:
    write_run(tmp_path, **{"eval.callbacks": [f"{__name__}:broken"]})
    problem = (
        "eval.callbacks: test_eval_callbacks:broken gives nan for 'perplexity': expected a finite number; the run"
    )
    for processes, name in ((1, "out"), (2, "two")):
        ranks = Ranks(processes, "distill", tmp_path / "run.yaml", f"out={tmp_path / name}")
        assert ranks.wait() == [1] * processes, ranks.texts
        (saved,) = (tmp_path / name / "checkpoints").iterdir()
        line = (
            f"{problem} has stopped after a checkpoint: {saved}; correct the cause, and the same command continues\n"
        )
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


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "gives NoneType: expected a dict"),
        ({"a": 10**5000}, "gives an integer of 16,610 bits for 'a'"),
        ({"a b": 1.0}, "gives the name 'a b'"),
        ({1: 1.0}, "gives the name 1"),
        ({"a": True}, "gives True for 'a'"),
        ({"a": "1"}, "gives '1' for 'a'"),
        ({"cross_entropy": 1.0}, "has an eval/cross_entropy already"),
    ],
)
def test_what_is_no_metrics_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^eval.callbacks: m:f .*{message}"):
        checked_metrics("eval.callbacks: m:f", returned, {"eval/cross_entropy"})


def test_a_function_that_does_not_exist_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"^eval\.callbacks: got 'accuracy', expected package\.module:function"):
        load_config(tmp_path / "run.yaml", ["eval.callbacks=[accuracy]"])
    failed = run("distill", tmp_path / "run.yaml", "eval.callbacks=['no_such_module:f']", code=2)
    assert "error: eval.callbacks: got 'no_such_module:f', but there is no module 'no_such_module'" in failed.err
