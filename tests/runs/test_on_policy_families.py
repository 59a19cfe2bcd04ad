"""On-policy runs of models that are not simply packed: the engine in the job has training's log-probabilities."""

from pathlib import Path

import pytest
from kit import slow
from kit.causal_families import build
from kit.on_policy_runs import rollout_figures, write_on_policy_run
from kit.runs import run
from kit.toy_tokenizer import toy_tokenizer


@pytest.mark.parametrize("family", ["qwen3_5_text", slow("gpt_oss"), slow("nemotron_h"), slow("llama4_text")])
def test_the_engine_has_the_log_probabilities_of_training(tmp_path: Path, family: str) -> None:
    tokenizer = toy_tokenizer()
    build(family, seed=1, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "student")
    tokenizer.save_pretrained(tmp_path / "student")
    write_on_policy_run(tmp_path, **{"train.steps": 4})
    ended = run("distill", tmp_path / "run.yaml", f"out={tmp_path / 'out'}")
    assert "documents of student: " in ended.out
    lines = rollout_figures(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["rollout/log_ratio_max"] < 1e-4 for line in lines)
    assert all(line["rollout/log_ratio"] < 1e-5 for line in lines)
