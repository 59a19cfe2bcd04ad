"""Records which samples a run trains on, from outside: one line per optimizer step, appended by rank 0.

    ranks = Ranks(1, "distill", …, hook=record_trained, hook_arguments=(str(path),))
    trained(path)                                   after the run has ended, however often it was started

A run that is killed makes the steps after its last checkpoint again, so the same step may have several lines.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainedStep:
    """step: from 0. numbers: of its samples. versions: the oldest and the newest that wrote one of their tokens."""

    step: int
    numbers: list[int]
    versions: tuple[int, int]


def record_trained(path: str) -> None:
    """A hook of a run's processes."""
    from stillhouse.loops.rollouts import Rollouts

    take, trained = Rollouts.take, Rollouts.trained
    taken: dict[str, Any] = {}

    def taking(rollouts: Rollouts, step: int, *others: Any) -> Any:
        samples = take(rollouts, step, *others)
        versions = [sample.completion.versions_N[sample.is_generated_N] for sample in samples]
        oldest, newest = min(version.min() for version in versions), max(version.max() for version in versions)
        numbers = [sample.number for sample in samples]
        taken.update(step=step, numbers=numbers, versions=[int(oldest), int(newest)])
        return samples

    def recording(rollouts: Rollouts, step: int) -> None:
        trained(rollouts, step)
        if os.environ.get("RANK", "0") == "0":
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, (json.dumps(taken) + "\n").encode())  # one call: a kill leaves a whole line or none
            os.close(file)

    Rollouts.take, Rollouts.trained = taking, recording  # type: ignore[method-assign]


def trained(path: Path) -> list[TrainedStep]:
    """The steps whose updates are in the final weights: of each step the last one, as later steps follow from it."""
    steps: dict[int, TrainedStep] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        steps = {step: kept for step, kept in steps.items() if step < record["step"]}
        steps[record["step"]] = TrainedStep(record["step"], record["numbers"], tuple(record["versions"]))
    return list(steps.values())


def wrong_in(steps: list[TrainedStep], count: int, samples: int, max_staleness: int) -> str:
    """What is wrong with a run's steps: "" if each of `samples` samples was trained exactly once, none too old."""
    if [step.step for step in steps] != list(range(count)):
        return f"steps {[step.step for step in steps]}, expected 0 to {count - 1}"
    counts = Counter(number for step in steps for number in step.numbers)
    if twice := sorted(number for number, times in counts.items() if times > 1):
        return f"samples {twice} were trained more than once"
    if lost := sorted(set(range(samples)) ^ counts.keys()):
        return f"samples {lost} were not trained, or are none of this run"
    for step in steps:
        oldest, newest = step.versions
        if not step.step - max_staleness <= oldest <= newest <= step.step:
            return f"step {step.step} has tokens of versions {oldest} to {newest}; the bound is {max_staleness}"
    return ""
