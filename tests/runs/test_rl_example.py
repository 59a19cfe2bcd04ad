"""The example of reinforcement learning: rewards rise, and its loss equals the one computed from logits."""

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_labels_are_the_answer_and_its_end(example: dict[str, Any]) -> None:
    tokenizer = example["make_tokenizer"]()
    texts = {"17+5=22<end><pad>": "22<end>", "99+9=1080": "1080", "05+1=6<end><end>2": "6<end>"}
    labels_BS = example["labels_of"](tokenizer(list(texts), return_tensors="pt").input_ids, tokenizer)
    expected = [([-1] * 4 + tokenizer(answer).input_ids + [-1] * 4)[:9] for answer in texts.values()]
    assert labels_BS.tolist() == expected


@pytest.mark.slow
def test_rewards_rise_and_log_probs_are_those_of_logits(example: dict[str, Any]) -> None:
    result = example["main"](["--imitate", "150", "--steps", "20"])
    assert sum(result.rewards[:5]) / 5 < 0.4
    assert sum(result.rewards[-5:]) > sum(result.rewards[:5]) + 5 * 0.1
    assert result.difference < 1e-5


def test_without_penalty_and_bonus(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--imitate", "1", "--steps", "10", "--problems", "2", "--group", "2", "--updates", "1"]
    example["main"]([*few, "--kl-scale", "0", "--entropy-bonus", "0"])
    assert "clipped" in capsys.readouterr().out
