"""Small on-policy runs: their configuration and data, and the figures that they log."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.layout_runs import weights
from kit.runs import metrics, write_records, write_run

from stillhouse.config import RunConfig

#: the figures that do not depend on the batches in which completions were written
SAME = (
    "step",
    "tokens",
    "rollout/completion_tokens",
    "rollout/truncated",
    "rollout/staleness",
    "rollout/staleness_max",
)


def write_on_policy_run(folder: Path, **settings: Any) -> RunConfig:
    """Write a run with prompts. Its steps have four prompts with two completions each."""
    folder.mkdir(exist_ok=True)
    records = [{"prompt": f"Two and {number} is", "completion": f" {number + 2}."} for number in range(15)]
    write_records(folder / "train.jsonl", records)
    write_records(folder / "eval.jsonl", records[:5])
    defaults = {
        "objective.loss": "reverse_kl",
        "rollout.max_new_tokens": 11,
        "rollout.samples_per_prompt": 2,
        "rollout.prompts_per_step": 4,
        "data.max_tokens": 37,
        "train.tokens_per_step": 37,
        "train.micro_batch_tokens": 74,
    }
    return write_run(folder, **defaults | settings)


def rollout_figures(out: Path) -> list[dict[str, float]]:
    """Return the figures of each step, without those that depend on the time."""
    lines = [line for line in metrics(out) if "rollout/share" in line]
    return [
        {key: value for key, value in line.items() if not key.startswith(("speed/", "seconds"))} for line in lines
    ]


def assert_same_figures(out: Path, expected_out: Path, keys: Sequence[str], loss: str) -> None:
    for figures, expected in zip(rollout_figures(out), rollout_figures(expected_out), strict=True):
        assert {key: figures[key] for key in keys} == {key: expected[key] for key in keys}
        assert figures[loss] == pytest.approx(expected[loss], rel=1e-5)


def assert_same_rollouts(out: Path, expected_out: Path, keys: Sequence[str], loss: str) -> None:
    """Compare two runs whose completions were written in different batches.

    keys: of the figures that are equal; loss: the key of a loss, which differs by rounding, as the weights do.
    """
    assert_same_figures(out, expected_out, keys, loss)
    for name, weight in weights(expected_out).items():
        assert weights(out)[name].sub(weight).abs().max() < 1e-4, name
