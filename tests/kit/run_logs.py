"""Reads and compares what runs have logged: the figures of their steps and evaluations."""

import json
from pathlib import Path

from kit.runs import contents, metrics

LOSSES = ("loss/total_nats_per_token", "train/gradient_norm", "train/agreement", "tokens", "train/learning_rate")


def losses(out: Path) -> list[list[float]]:
    return [[line["step"], *(line[key] for key in LOSSES)] for line in metrics(out) if LOSSES[0] in line]


def evaluations(out: Path) -> list[list[float]]:
    return [[line["step"], line["eval/cross_entropy"]] for line in metrics(out) if "eval/tokens" in line]


def last_step(out: Path) -> int:
    """Return the step of the log's last complete line, while a run is writing."""
    if not (out / "metrics.jsonl").exists():
        return -1
    lines = (out / "metrics.jsonl").read_text().split("\n")[:-1]
    return json.loads(lines[-1])["step"] if lines else -1


def assert_same_run(out: Path, expected_out: Path) -> None:
    """Compare the models and the logged figures of two runs, which must be equal to the bit."""
    assert contents(out / "model") == contents(expected_out / "model")
    assert losses(out) == losses(expected_out)
    assert evaluations(out) == evaluations(expected_out)
