"""metrics.jsonl: one line for each step and each evaluation, with the step and the metrics by their keys."""

import itertools
import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stillhouse.display import escaped
from stillhouse.output.json_lines import parse_object, read_lines


@dataclass(frozen=True)
class MetricsLine:
    """values: the metrics and the run's "tokens" and "seconds" so far; None for a number that is not finite."""

    step: float
    values: dict[str, float | None]

    def encoded(self) -> bytes:
        return (json.dumps({"step": self.step, **self.values}, allow_nan=False) + "\n").encode()


def parse_metrics(raw: bytes, where: str) -> MetricsLine:
    """Parse a line without its newline. Raises ValueError with `where` and the key."""
    line = parse_object(raw, where)
    if not _is_number(line.get("step")) or not math.isfinite(line["step"]):
        shown = escaped(raw[:80].decode(errors="replace"))
        raise ValueError(f'{where}: expected an object with a number "step", got {shown}')
    for key, value in line.items():
        if value is not None and not _is_number(value):
            raise ValueError(f"{where}: {escaped(key)[:80]} is {reprlib.repr(value)}; expected a number or null")
    return MetricsLine(line.pop("step"), without_infinity(line))


def without_infinity(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Replace values that are not finite by None, because JSON has no infinity and no NaN."""
    return {key: value if value is not None and math.isfinite(value) else None for key, value in values.items()}


def read_metrics(path: Path) -> tuple[list[MetricsLine], list[str]]:
    """Return the lines of a metrics.jsonl, and notes for the page.

    An incomplete last line without a newline is skipped, because a killed run can end in such a line.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} contains no run: it has no metrics.jsonl. Give the `out` folder of a run.")
    notes: list[str] = []
    lines = [line for _, _, line in read_lines(path, parse_metrics, notes)]
    if not lines:
        notes.append(f"{path.name} has no line yet, so there is no curve.")
    for number, (before, line) in enumerate(itertools.pairwise(lines), start=2):
        if line.step < before.step:
            raise ValueError(
                f"{path}:{number}: step {line.step} follows step {before.step}; steps must not decrease. "
                "Two runs have written to this folder: remove the lines of one run, or run again with a new folder."
            )
    return lines, notes


def _is_number(value: object) -> bool:
    """Whether the value is a number that can be drawn: an integer must fit into a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max
