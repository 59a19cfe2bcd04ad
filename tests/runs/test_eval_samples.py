"""eval.samples: the student completes the same held-out prompts at each evaluation."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.ranks import run_ranks
from kit.runs import Command, metrics, run, session_of, write_records, write_run
from transformers import AutoModelForCausalLM

from stillhouse.loops.callbacks import EvaluationContext
from stillhouse.loops.greedy_evaluation import PROMPT_TOKENS, choose_prompts
from stillhouse.output.records import EvalSample

SETTINGS = {"eval.samples": 3, "eval.task_tokens": 7, "eval.every": 2, "checkpoint.every": 2, "checkpoint.keep": 9}


def samples(out: Path) -> list[EvalSample]:
    return [EvalSample(**json.loads(line)) for line in (out / "eval_samples.jsonl").read_text().splitlines()]


def test_completions_are_the_greedy_ones_of_the_saved_students(tmp_path: Path) -> None:
    write_run(tmp_path, **SETTINGS)
    run("distill", tmp_path / "run.yaml")
    shown = samples(tmp_path / "out")
    expected = [(step, number) for step in (0, 2, 4, 6) for number in range(3)]
    assert [(sample.step, sample.number) for sample in shown] == expected
    session = session_of(tmp_path, **SETTINGS)
    assert session.data.evaluation is not None
    chosen = choose_prompts(session.data.evaluation.documents, 3)
    folders = {0: tmp_path / "student", 6: tmp_path / "out" / "model"}
    models = {step: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for step, path in folders.items()}
    for sample in shown:
        prompt = chosen[sample.number]
        assert sample.source == prompt.source
        assert sample.prompt == session.data.tokenizer.decode(prompt.prompt_N)
        assert sample.reference == session.data.tokenizer.decode(prompt.reference_N[:7])
        if sample.step in models:
            ids = torch.from_numpy(prompt.prompt_N.astype(np.int64))[None]
            generated = models[sample.step].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False, pad_token_id=0
            )
            assert session.data.tokenizer.decode(generated[0, ids.shape[1] :]) == sample.completion
    assert shown[0].completion != shown[-3].completion


def lengths(context: EvaluationContext) -> dict[str, float]:
    """A callback, whose texts rank 0 alone completes."""
    return {"callback": float(sum(map(len, context.generate(["the first text", "another"]))))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.pipeline=2"])
def test_two_processes_evaluate_as_one_does(tmp_path: Path, layout: str) -> None:
    """The samples, and the metrics of tasks and callbacks."""
    write_run(tmp_path, **SETTINGS, **{"eval.callbacks": [f"{__name__}:lengths"], "eval.tasks": ["sums(2:3)"]})
    run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'one'}")
    run_ranks(2, "distill", tmp_path / "run.yaml", f"out={tmp_path / 'two'}", layout)
    assert samples(tmp_path / "two") == samples(tmp_path / "one")
    keys = ("eval/callback", "eval/exact_match/sums", "eval/tasks_truncated")
    one, two = (
        [[line[key] for key in keys] for line in metrics(tmp_path / out) if "eval/tokens" in line]
        for out in ("one", "two")
    )
    assert two == one


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
    assert sorted(prompt.source for prompt in chosen) == sorted(documents.sources)
    assert [prompt.source for prompt in choose_prompts(documents, 3)] == [prompt.source for prompt in chosen[:3]]
    for prompt in chosen:
        document = documents.sources.index(prompt.source)
        ids_N, targets_N = documents.tokens(document), documents.targets(document)
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
    sources = [Path(prompt.source).name for prompt in choose_prompts(session.data.evaluation.documents, 6)]
    assert [source.partition(":")[0] for source in sources] == ["eval.jsonl", "few.jsonl"] * 2 + ["eval.jsonl"] * 2
