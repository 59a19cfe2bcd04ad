"""Reads a run folder: metrics.jsonl, config.yaml, environment.json, data.json and tokens.json as typed values.

`rollout_files` reads the two files that only on-policy runs have, `eval_samples` the one of runs with eval.samples.

A killed run may lack any file except metrics.jsonl, and the last line of metrics.jsonl may be incomplete. `Run.notes`
lists what is missing, and the page shows it. Other malformed content is an error that names the file and
the place in the file.
"""

import itertools
import json
import math
import reprlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stillhouse.config import ConfigError
from stillhouse.config.yaml_text import read_yaml
from stillhouse.display import escaped
from stillhouse.libraries import reading
from stillhouse.output.report.eval_samples import EvalSample, read_eval_samples
from stillhouse.output.report.rollout_files import Rollouts, read_rollouts
from stillhouse.output.report.validation import INCOMPLETE, validated

# For each file, what the page lacks without it.
OPTIONAL_FILES = {
    "config.yaml": "the run's configuration and its models' names",
    "environment.json": "versions, machine and date",
    "data.json": "how many documents were read, cut and skipped",
    "tokens.json": "the held-out text, which the last evaluation writes for one teacher of the full vocabulary",
}


class TermAtToken(BaseModel):
    """What a term of the objective does at one token.

    value: in nats. gradient: the norm of the gradient of scale · value with respect to the student's logits. raises,
    lowers: lists of (token text, entry of that gradient without its sign) for the logits that a step against the
    gradient raises and lowers most, the largest first.
    """

    value: float
    gradient: float
    raises: list[tuple[str, float]]
    lowers: list[tuple[str, float]]


class Token(BaseModel):
    """One token of a held-out document, and the two distributions that predicted it.

    `kl` is KL(teacher ‖ student) in nats over the full vocabulary; None for a document's first token, which nothing
    predicts. `teacher` and `student` are lists of (token text, probability), most probable first. `terms` is empty
    for a token that is no target, and in the files of earlier versions.
    """

    text: str
    target: bool
    kl: float | None
    teacher: list[tuple[str, float]]
    student: list[tuple[str, float]]
    terms: dict[str, TermAtToken] = {}


class Document(BaseModel):
    source: str
    tokens: list[Token]


class HeldOut(BaseModel):
    """tokens.json: held-out documents with the predictions of teacher and student at `step`."""

    step: int
    documents: list[Document]


@dataclass(frozen=True)
class Line:
    """One line of metrics.jsonl: `values` by metric, None for a number that is not finite."""

    step: float
    values: dict[str, float | None]


@dataclass(frozen=True)
class Run:
    """One run folder, with its lines in step order."""

    path: Path
    lines: list[Line]
    config_text: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    held_out: HeldOut | None = None
    rollouts: Rollouts | None = None
    eval_samples: list[EvalSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def has_held_out_data(self) -> bool:
        """Whether the run was to have held-out data; True if that is not known."""
        return _asks_for_held_out_data(self.config)

    def first_and_last(self, key: str) -> tuple[float, float] | None:
        """Return the first and the last finite value of a metric, or None if there is none."""
        values = [value for line in self.lines if (value := line.values.get(key)) is not None]
        return (values[0], values[-1]) if values else None


def read_run(path: Path) -> Run:
    """Read everything that the page needs from a run folder.

    Raises:
        ValueError: there is no metrics.jsonl, or a file is malformed (with file and line, or file and key).
    """
    lines, notes = read_metrics(path / "metrics.jsonl")
    config_text, config = _read_config(path / "config.yaml")
    expected = [name for name in OPTIONAL_FILES if name != "tokens.json" or _asks_for_held_out_data(config)]
    missing = [name for name in expected if not (path / name).is_file()]
    notes += [f"{name} is missing: {OPTIONAL_FILES[name]}." for name in missing]
    rollouts, rollout_notes = read_rollouts(path, expected=isinstance(config.get("rollout"), dict))
    section = config.get("eval")
    asks_for_samples = isinstance(section, dict) and bool(section.get("samples"))
    eval_samples, sample_notes = read_eval_samples(path / "eval_samples.jsonl", expected=asks_for_samples)
    return Run(
        path=path,
        lines=lines,
        config_text=config_text,
        config=config,
        environment=_read_object(path / "environment.json"),
        data=_read_object(path / "data.json"),
        held_out=_read_held_out(path / "tokens.json"),
        rollouts=rollouts,
        eval_samples=eval_samples,
        notes=notes + rollout_notes + sample_notes,
    )


def read_metrics(path: Path) -> tuple[list[Line], list[str]]:
    """Return the lines of a metrics.jsonl, and notes for the page.

    Only a last line without a newline may be unreadable; it is left out, since a killed run can end in such a line.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} contains no run: it has no metrics.jsonl. Give the `out` folder of a run.")
    *complete, rest = path.read_bytes().split(b"\n")
    lines = [_parse_line(raw, f"{path}:{number}") for number, raw in enumerate(complete, start=1)]
    notes = []
    if rest:
        try:
            lines.append(_parse_line(rest, f"{path}:{len(complete) + 1}"))
        except ValueError:
            notes.append(INCOMPLETE.format(path.name))
    if not lines:
        notes.append(f"{path.name} has no line yet, so there is no curve.")
    for number, (before, line) in enumerate(itertools.pairwise(lines), start=2):
        if line.step < before.step:
            raise ValueError(
                f"{path}:{number}: step {line.step} follows step {before.step}; steps must not decrease. "
                "Two runs have written to this folder: remove the lines of one run, or run again with a new folder."
            )
    return lines, notes


def _asks_for_held_out_data(config: dict[str, Any]) -> bool:
    data = config.get("data")
    return not isinstance(data, dict) or data.get("eval", True) not in (0, None)


def _parse_line(raw: bytes, where: str) -> Line:
    with reading(f"{where}: not a JSON object"):
        line = json.loads(raw)
    if not isinstance(line, dict) or not _is_number(line.get("step")) or not math.isfinite(line["step"]):
        shown = escaped(raw[:80].decode(errors="replace"))
        raise ValueError(f'{where}: expected an object with a number "step", got {shown}')
    for key, value in line.items():
        if value is not None and not _is_number(value):
            raise ValueError(f"{where}: {escaped(key)[:80]} is {reprlib.repr(value)}; expected a number or null")
    step = line.pop("step")
    return Line(
        step, {key: value if value is not None and math.isfinite(value) else None for key, value in line.items()}
    )


def _is_number(value: object) -> bool:
    """Whether the value is a number; an integer must fit into a float, since curves are drawn with floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def _read_config(path: Path) -> tuple[str | None, dict[str, Any]]:
    if not path.is_file():
        return None, {}
    with reading(f"{path}: not UTF-8 text"):
        text = path.read_text(encoding="utf-8")
    try:
        config = read_yaml(text, str(path))
    except ConfigError as error:  # ConfigError is for the caller's own configuration, not for a run's file
        raise ValueError(str(error)) from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a mapping of sections, got {type(config).__name__}")
    return text, config


def _read_object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    with reading(f"{path}: not JSON"):
        value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_held_out(path: Path) -> HeldOut | None:
    value = _read_object(path)
    return None if value is None else validated(HeldOut, value, str(path))
