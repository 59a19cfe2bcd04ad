"""`stillhouse verify`: checks that a run's folder is what the run wrote, without loading a model.

It checks every checkpoint by its hashes and by the coverage of its tensors; the metrics by the hash in the newest
checkpoint, and that each step occurs once; and the final model by its hashes.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stillhouse.checkpoint.checkpoint_folder import DAMAGED, checkpoints
from stillhouse.checkpoint.integrity import verified
from stillhouse.config import load_config
from stillhouse.output.disk import UNFINISHED
from stillhouse.output.folder import RunFolder, require_intact_model
from stillhouse.output.metrics_file import MetricsLine, read_metrics
from stillhouse.output.progress import Progress, read_state


@dataclass(frozen=True)
class Finding:
    """One row of the table. problem: what is wrong; if it is None, `detail` describes what was found."""

    what: str
    detail: str = ""
    problem: str | None = None

    def __str__(self) -> str:
        verdict, text = ("ok", self.detail) if self.problem is None else ("WRONG", self.problem)
        return f"{self.what:<28}{verdict:<7}{text}"


def verify(path: Path) -> Iterator[Finding]:
    """The findings, one for each part of the folder. Raises ValueError for a folder without a run."""
    folder = RunFolder(path)
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} contains no run: it has no config.yaml. Give the `out` folder of a run")
    yield _configuration(path / "config.yaml")
    newest: Progress | None = None
    for checkpoint in checkpoints(folder.checkpoints):
        finding = _checkpoint(checkpoint)
        if finding.problem is None:
            newest = read_state(checkpoint).progress
        yield finding
    yield _metrics(folder.metrics, newest)
    if folder.complete:
        yield _model(folder)
    for file in sorted([*path.iterdir(), *folder.checkpoints.glob("*")]):
        if file.name.endswith(UNFINISHED):
            yield Finding(file.name, "left over from a process that was killed; removed when the run is resumed")
        if DAMAGED in file.name:
            yield Finding(file.name, "a damaged checkpoint that checkpoint.fallback has renamed")


def _configuration(path: Path) -> Finding:
    try:
        config = load_config(path)
    except ValueError as error:
        return Finding(path.name, problem=str(error))
    return Finding(path.name, f"{config.student.model}, {config.objective.loss}")


def _checkpoint(path: Path) -> Finding:
    try:
        state = verified(path, with_student=True).state
    except ValueError as error:
        return Finding(path.name, problem=str(error))
    size = sum((path / name).stat().st_size for name in state.files)
    return Finding(path.name, f"{len(state.files)} files of {size:,} bytes, {state.progress.tokens:,} tokens trained")


def _metrics(path: Path, newest: Progress | None) -> Finding:
    try:
        lines, notes = read_metrics(path)
    except ValueError as error:
        return Finding(path.name, problem=str(error))
    trained = [line.step for line in lines if _is_training(line)]
    evaluated = [line.step for line in lines if not _is_training(line)]
    twice = [f"{step:g}" for step, count in Counter(trained).items() if count > 1]
    twice += [f"the evaluation at {step:g}" for step, count in Counter(evaluated).items() if count > 1]
    if twice:
        return Finding(path.name, problem=f"more than once: {', '.join(twice[:5])}")
    if trained and len(trained) != trained[-1] - trained[0] + 1:
        return Finding(path.name, problem=f"{len(trained)} steps from {trained[0]:g} to {trained[-1]:g}")
    if newest is not None and newest.saved_log(path) is None:
        problem = f"does not begin with the lines that it had when step {newest.step} was saved"
        return Finding(path.name, problem=problem)
    steps = f"steps {trained[0]:g} to {trained[-1]:g}, each once" if trained else "no step yet"
    return Finding(path.name, "; ".join([f"{steps}; {len(evaluated)} evaluations", *notes]))


def _is_training(line: MetricsLine) -> bool:
    return "train/learning_rate" in line.values


def _model(folder: RunFolder) -> Finding:
    try:
        return Finding("model", require_intact_model(folder))
    except ValueError as error:
        return Finding("model", problem=str(error))
