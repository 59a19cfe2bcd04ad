"""Reads what a run has logged: the figures of its steps and evaluations, and its last step."""

import json
from pathlib import Path

from kit.runs import metrics

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
