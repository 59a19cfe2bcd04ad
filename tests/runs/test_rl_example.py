"""The example of reinforcement learning: rewards rise, and its loss equals the one computed from logits."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def test_labels_are_the_answer_and_its_end(example: dict[str, Any]) -> None:
    tokenizer = example["make_tokenizer"]()
    texts = ["17+5=22<end><pad>", "99+9=108<end>", "99+9=1080", "05+1=6<end><end>2"]
    ids_BS = tokenizer(texts, return_tensors="pt").input_ids
    labels_BS = example["labels_of"](ids_BS, tokenizer)
    answers = ["22<end>", "108<end>", "1080", "6<end>"]
    for labels_S, answer in zip(labels_BS.tolist(), answers, strict=True):
        expected = tokenizer(answer).input_ids
        assert labels_S == [-1] * 4 + expected + [-1] * (5 - len(expected))


def test_advantages_are_within_a_group(example: dict[str, Any]) -> None:
    """Three problems have four answers each: one right answer, none, and all right."""
    rewards_B = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1])
    expected_B = torch.tensor([3**0.5, *[-(3**-0.5)] * 3, *[0.0] * 8])
    torch.testing.assert_close(example["advantages"](rewards_B, 4), expected_B, rtol=1e-3, atol=0)


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
