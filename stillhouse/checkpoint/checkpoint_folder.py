"""The folder of a run's checkpoints: lists the checkpoints, finds the best one, and removes old ones."""

import itertools
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from stillhouse.output.disk import UNFINISHED
from stillhouse.output.progress import PREFIX, DamagedCheckpointError, read_state

#: the suffix that `set_aside` adds to the name of a damaged checkpoint
DAMAGED = ".damaged"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    named = (path for path in folder.glob(f"{PREFIX}*") if re.fullmatch(rf"{PREFIX}\d+", path.name))
    return sorted(named, key=lambda path: int(path.name.removeprefix(PREFIX)))


def prune(folder: Path, keep: int, best: str | None, greater: bool | None = None) -> list[str]:
    """Remove all checkpoints except the newest `keep` and the one with the best value of the metric `best`.

    greater: true if a higher value of the metric is better; None: true for agreement and exact match only.
    Checkpoints with a damaged state.json are kept. Returns one message for each of them.
    """
    every = checkpoints(folder)
    metrics, damage = _evaluations(every)
    kept = set(every[-keep:]) | (set(every) - metrics.keys())
    if best is not None and (first := _best(metrics, best, greater)) is not None:
        kept.add(first)
    for path in every:
        if path not in kept:
            unfinished = path.with_name(path.name + UNFINISHED)
            path.rename(unfinished)  # an interrupted removal must not leave a folder that looks like a checkpoint
            shutil.rmtree(unfinished)
    return damage


def best_checkpoint(paths: list[Path], metric: str, greater: bool | None = None) -> tuple[Path | None, list[str]]:
    """The checkpoint with the best value of a metric (None if no checkpoint has the metric), and one message for each
    damaged state.json. greater: as in `prune`.
    """
    metrics, damage = _evaluations(paths)
    return _best(metrics, metric, greater), damage


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that `checkpoints` no longer lists it; returns its new path."""
    names = (f"{path.name}{DAMAGED}{number or ''}" for number in itertools.count())
    return path.rename(next(free for free in map(path.with_name, names) if not free.exists()))


def _best(metrics: Mapping[Path, Mapping[str, float]], metric: str, greater: bool | None) -> Path | None:
    """The checkpoint with the best value of a metric. If several checkpoints have it, the earliest is returned."""
    if greater is None:
        greater = metric.startswith("eval/exact_match") or metric.endswith(("/agreement", "prompts/reward"))
    sign = -1.0 if greater else 1.0
    ranked = [(sign * values[metric], path) for path, values in metrics.items() if metric in values]
    return min(ranked)[1] if ranked else None


def _evaluations(paths: list[Path]) -> tuple[dict[Path, dict[str, float]], list[str]]:
    """The metrics in each readable state.json, and one message for each damaged state.json."""
    metrics: dict[Path, dict[str, float]] = {}
    damage: list[str] = []
    for path in paths:
        try:
            metrics[path] = read_state(path).progress.metrics
        except DamagedCheckpointError as error:
            damage.append(str(error))
    return metrics, damage
