"""`stillhouse verify`: checks that the files of a run's folder are unchanged, without loading a model.

Every checkpoint must match its hashes and have all tensors. The values of config.yaml that determine the weights must
be the same as when the newest checkpoint was written. metrics.jsonl must match the hash in the newest checkpoint and
repeat no step. The final model must match its hashes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stillhouse.checkpoint.checkpoint_folder import DAMAGED, checkpoints, verified
from stillhouse.checkpoint.resume import configuration_hash
from stillhouse.config import load_config
from stillhouse.config.read_config import dotted_values
from stillhouse.output.disk import UNFINISHED
from stillhouse.output.folder import RunFolder, require_intact_model
from stillhouse.output.json_lines import read_metrics
from stillhouse.output.progress import Progress, read_state


class Finding(NamedTuple):
    """One row of the table. part: what is checked. problem: the error, or None. detail: facts, without an error."""

    part: str
    detail: str = ""
    problem: str | None = None

    def __str__(self) -> str:
        verdict, text = ("ok", self.detail) if self.problem is None else ("WRONG", self.problem)
        return f"{self.part:<28}{verdict:<7}{text}"


def verify_run(path: Path) -> Iterator[Finding]:
    """Yield one finding per part of the folder. Raises ValueError if the folder contains no run."""
    folder = RunFolder(path)
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} contains no run: it has no config.yaml. Give the `out` folder of a run")
    newest: Progress | None = None
    findings = []
    for checkpoint in checkpoints(folder.checkpoints):
        findings.append(_finding(checkpoint.name, partial(_checkpoint, checkpoint)))
        if findings[-1].problem is None:
            newest = read_state(checkpoint).progress
    yield _finding("config.yaml", partial(_configuration, path / "config.yaml", newest))
    yield from findings
    yield _finding(folder.metrics.name, partial(_metrics, folder.metrics, newest))
    if folder.complete:
        yield _finding("model", partial(require_intact_model, folder))
    for file in sorted([*path.iterdir(), *folder.checkpoints.glob("*")]):
        if file.name.endswith(UNFINISHED):
            yield Finding(file.name, "left over from a process that was killed; the resumed run will remove it")
        if DAMAGED in file.name:
            yield Finding(file.name, "a damaged checkpoint that checkpoint.fallback has renamed")


def _finding(part: str, described: Callable[[], str]) -> Finding:
    """Make a finding. described: a function that returns the detail, or raises ValueError for a problem."""
    try:
        return Finding(part, described())
    except ValueError as error:
        return Finding(part, problem=str(error))


def _configuration(path: Path, newest: Progress | None) -> str:
    config = load_config(path)
    if newest is not None and newest.configuration != configuration_hash(dotted_values(config)):
        raise ValueError("values that affect the weights have changed since the newest checkpoint was written")
    return f"{config.student.model}, {', '.join(config.objective.losses.values())}"


def _checkpoint(path: Path) -> str:
    state = verified(path, with_student=True).state
    size = sum((path / name).stat().st_size for name in state.files)
    return f"{len(state.files)} files of {size:,} bytes, {state.progress.tokens:,} tokens trained"


def _metrics(path: Path, newest: Progress | None) -> str:
    lines, notes = read_metrics(path)
    trained = [line.step for line in lines if "train/learning_rate" in line.values]
    evaluated = [line.step for line in lines if "train/learning_rate" not in line.values]
    twice = [f"step {step:g}" for step, count in Counter(trained).items() if count > 1]
    twice += [f"the evaluation at step {step:g}" for step, count in Counter(evaluated).items() if count > 1]
    if twice:
        raise ValueError(f"repeats {', '.join(twice[:5])}")
    if trained and len(trained) != trained[-1] - trained[0] + 1:
        raise ValueError(f"steps are missing: {len(trained)} steps from {trained[0]:g} to {trained[-1]:g}")
    if newest is not None and newest.saved_log(path) is None:
        raise ValueError(f"does not begin with the lines that it had when step {newest.step} was saved")
    steps = f"steps {trained[0]:g} to {trained[-1]:g}, each once" if trained else "no step yet"
    return "; ".join([f"{steps}; {len(evaluated)} evaluations", *notes])
