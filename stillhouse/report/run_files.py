"""Reads a run's folder into a `Run`, which has all data for the page.

A killed run may lack any file except metrics.jsonl, and the last line of a file of JSON lines may be incomplete. The
page lists missing content (`Run.notes`). Other malformed content raises an error with the file and the line or key.
"""

import json
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from stillhouse.config import ConfigError
from stillhouse.config.yaml_text import read_yaml
from stillhouse.libraries import reading
from stillhouse.output.json_lines import MetricsLine, read_metrics, read_object, read_objects, validated
from stillhouse.output.records import EvalSample, HeldOutTokens, SampleRecord, TimelineSpan

METRICS = "metrics.jsonl"
#: the other files, and the content of each file, which the page lacks if the file is missing
OPTIONAL_FILES = {
    "config.yaml": "the run's configuration and its models' names",
    "environment.json": "versions, machine and date",
    "data.json": "the numbers of documents that were read, cut and skipped",
    "tokens.json": "the held-out text by token, which a run with one teacher over the full vocabulary records",
    "timeline.jsonl": "the timeline of each part of the job, and the times at which the trainer waited",
    "samples.jsonl": "some of the completions that the run was trained on",
    "eval_samples.jsonl": "the student's completions of held-out prompts",
}
_ON_POLICY = {"timeline.jsonl", "samples.jsonl"}

SPANS = 4000  # the number of newest spans that are read; the page shows the spans of the last steps
STEPS = 200  # the maximum number of steps whose samples are shown
TOKENS = 40_000  # the maximum number of tokens of all shown samples together; more tokens make the page slow
EVAL_SAMPLES = 4000  # the number of newest samples that are read


@dataclass(frozen=True)
class Rollouts:
    """The records of an on-policy run.

    spans: the newest spans, in the order of the file. samples: the samples of some steps, by step.
    sampled_steps: the number of steps with samples. staleness: the number of the student's completions by staleness.
    """

    spans: list[TimelineSpan]
    samples: dict[int, list[SampleRecord]]
    sampled_steps: int
    staleness: dict[int, int]


@dataclass(frozen=True)
class Run:
    """The content of a run's folder. lines: the lines of metrics.jsonl, in step order.

    has_held_out_data: whether the configuration has held-out data; True if the configuration is missing.
    """

    path: Path
    lines: list[MetricsLine]
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    held_out: HeldOutTokens | None = None
    rollouts: Rollouts | None = None
    eval_samples: list[EvalSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_held_out_data: bool = True

    def first_and_last(self, key: str) -> tuple[float, float] | None:
        """Return the first and the last finite value of a metric, or None if there is none."""
        values = [value for line in self.lines if (value := line.values.get(key)) is not None]
        return (values[0], values[-1]) if values else None

    def section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration; {} if it is missing or not a mapping."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}


def read_run(path: Path) -> Run:
    """Read everything that the page needs from a run folder.

    Raises ValueError if there is no metrics.jsonl, or if a file is malformed (with file and line, or file and key).
    """
    lines, notes = read_metrics(path / METRICS)
    present = {name for name in OPTIONAL_FILES if (path / name).is_file()}
    config_text: str | None = None
    config, file = dict[str, Any](), path / "config.yaml"
    if "config.yaml" in present:
        with reading(f"{file}: not UTF-8 text"):
            config_text = file.read_text(encoding="utf-8")
        try:
            config = read_yaml(config_text, str(file))
        except ConfigError as error:  # ConfigError is only for the configuration of the caller
            raise ValueError(str(error)) from error
        if not isinstance(config, dict):
            raise ValueError(f"{file}: expected a mapping of sections, got {type(config).__name__}")
    # the files that a run of this configuration should have
    expected = {"config.yaml", "environment.json", "data.json"}
    data, evaluation = config.get("data"), config.get("eval")
    has_held_out_data = not isinstance(data, dict) or data.get("eval", True) not in (0, None)
    if has_held_out_data and (not config or isinstance(config.get("teacher"), dict)):
        expected.add("tokens.json")
    if isinstance(config.get("rollout"), dict) or present & _ON_POLICY:
        expected |= _ON_POLICY
    if isinstance(evaluation, dict) and evaluation.get("samples"):
        expected.add("eval_samples.jsonl")
    notes += [
        f"{name} is missing: the page lacks {OPTIONAL_FILES[name]}."
        for name in OPTIONAL_FILES
        if name in expected - present
    ]
    held_out = read_object(path / "tokens.json")
    eval_samples = (
        validated(EvalSample, value, where) for where, _, value in read_objects(path / "eval_samples.jsonl", notes)
    )
    return Run(
        path=path,
        lines=lines,
        config_text=config_text,
        config=config,
        environment=read_object(path / "environment.json"),
        data=read_object(path / "data.json"),
        held_out=None if held_out is None else validated(HeldOutTokens, held_out, str(path / "tokens.json")),
        rollouts=_read_rollouts(path, notes) if present & _ON_POLICY else None,
        eval_samples=list(deque(eval_samples, maxlen=EVAL_SAMPLES)),
        notes=notes,
        has_held_out_data=has_held_out_data,
    )


def _read_rollouts(folder: Path, notes: list[str]) -> Rollouts:
    lines = read_objects(folder / "timeline.jsonl", notes)
    spans = (validated(TimelineSpan, value, where) for where, _, value in lines)
    last_spans = list(deque(spans, maxlen=SPANS))
    path = folder / "samples.jsonl"
    places: dict[int, list[tuple[str, int, int]]] = {}  # by step, for each sample: line, offset, number of tokens
    staleness = Counter[int]()
    for where, offset, value in read_objects(path, notes):
        tokens = value.get("tokens")
        sample = validated(SampleRecord, value | {"tokens": []} if isinstance(tokens, list) else value, where)
        places.setdefault(sample.step, []).append((where, offset, len(tokens or [])))
        if sample.source == "student":
            staleness[sample.staleness] += 1
    samples: dict[int, list[SampleRecord]] = {}
    for step in shown_steps({step: sum(count for *_, count in entries) for step, entries in places.items()}):
        with path.open("rb") as file:
            for where, offset in first_samples(places[step]):
                file.seek(offset)
                samples.setdefault(step, []).append(validated(SampleRecord, json.loads(file.readline()), where))
    return Rollouts(last_spans, samples, len(places), dict(sorted(staleness.items())))


def first_samples(samples: Sequence[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Return the lines and offsets of a step's first samples that together have at most `TOKENS` tokens."""
    totals = accumulate(tokens for *_, tokens in samples)
    return [(where, offset) for (where, offset, _), total in zip(samples, totals, strict=True) if total <= TOKENS]


def shown_steps(tokens: dict[int, int]) -> list[int]:
    """Choose at most `STEPS` evenly spaced steps with at most `TOKENS` tokens in all; always choose the last step.

    tokens: the number of tokens of the samples of each step.
    """
    steps = sorted(tokens)
    count = min(STEPS, len(steps))
    while True:
        # counted from the end, so that the last step is chosen
        chosen = [steps[-1 - number * len(steps) // count] for number in range(count)]
        if count <= 1 or sum(tokens[step] for step in chosen) <= TOKENS:
            return chosen[::-1]
        count -= max(1, count // 10)
