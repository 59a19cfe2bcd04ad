"""The last lines of a run in the terminal: its results, its time, and the commands that use the trained student."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from stillhouse.display import duration
from stillhouse.output.json_lines import MetricsLine, read_metrics
from stillhouse.output.metrics import TOTAL, headline, is_greater_better, known_metric


def closing_lines(path: Path, best: str | None, greater: bool | None) -> list[str]:
    """Return the first and the last value of the metrics that summarise a run, and the run's time.

    path: the metrics.jsonl of the run.
    best, greater: checkpoint.best, whose best step is named, and checkpoint.greater_is_better.
    """
    lines, _ = read_metrics(path)
    keys = {key for line in lines for key in line.values}
    results = list(dict.fromkeys([*headline(keys), *([best] if best in keys else [])])) or [TOTAL]
    texts = [_result(lines, key, is_greater_better(key, greater) if key == best else None) for key in results]
    last = lines[-1]
    tokens, seconds = (last.values.get(key) or 0 for key in ("tokens", "seconds"))
    return [
        *filter(None, texts),
        f"trained: {last.step:,.0f} steps, {tokens:,.0f} target tokens, {duration(seconds)}",
    ]


def _result(lines: Sequence[MetricsLine], key: str, greater: bool | None) -> str:
    """Return the first and the last value of a metric in words, and its best step; "" without a finite value.

    greater: whether a higher value is better; None if the best step is not named.
    """
    metric = known_metric(key)
    values = [(value, line.step) for line in lines if (value := line.values.get(key)) is not None]
    if not values:
        return ""
    ends = f"{metric.text(values[0][0])} → {metric.text(values[-1][0])}"
    text = f"{metric.title}: {ends} {metric.unit}".rstrip()
    if greater is None:
        return text
    sign = -1 if greater else 1
    value, step = min(values, key=lambda pair: (sign * pair[0], pair[1]))
    return f"{text}, best {metric.text(value)} at step {step:,.0f}"


def next_commands(run: Path, held_out: str | None) -> str:
    """Return the commands that use a run's student. held_out: the source of held-out documents, None without one."""
    folder = shlex.quote(str(run))
    commands = [f"stillhouse chat {folder}", f"stillhouse export {folder} --out {shlex.quote(f'{run}-exported')}"]
    if held_out is not None:
        commands.insert(1, f"stillhouse evaluate {folder} --data {shlex.quote(held_out)}")
    return "\n  ".join(["next:", *commands])
