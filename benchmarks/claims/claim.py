"""What a claim is: how it is measured, and the rule that gives its verdict.

A claim predicts that some differences are positive. `verdict_of` decides by the figures of all seeds, as RULE says.
The texts of claims are in claims.yaml.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.seed_runs import SeedRuns

#: the figures of one seed: by the name of a setting, then by the name of a metric
Figures = Mapping[str, Mapping[str, float]]

HOLDS, OPEN, WRONG = "holds", "does not show at this size", "is wrong here"
RULE = """\
A claim predicts that one or more differences are positive. A difference is confirmed if its mean over the seeds is
above its margin and it is positive in every seed. It is contradicted if its mean is below minus its margin and it is
negative in every seed. A claim holds if all of its differences are confirmed, is wrong here if any of them is
contradicted, and otherwise does not show at this size.
"""


@dataclass(frozen=True)
class Difference:
    """A difference that a claim predicts to be positive.

    text: what is subtracted from what. of: the difference in the figures of one seed. margin: in its unit.
    """

    text: str
    of: Callable[[Figures], float]
    margin: float = 0.0


@dataclass(frozen=True)
class Claim:
    """How a claim is measured.

    name: in claims.yaml, of the command and of the result file. metrics: the figures that the page shows, by their
    name, and their headings. measure: measures the figures of one seed; None if they are in the committed result file
    `earlier`, from which `read` gives the figures of each seed.
    """

    name: str
    metrics: Mapping[str, str]
    differences: Sequence[Difference]
    measure: Callable[[SeedRuns], Figures] | None = None
    earlier: str = ""
    read: Callable[[Mapping[str, Any]], Sequence[Figures]] | None = None

    def result_file(self, results: Path) -> Path | None:
        """The newest result file of the claim, or the committed one; None if it has not been measured."""
        files = sorted(results.glob(self.earlier or f"claim-{self.name}-????-??-??.json"))
        return files[-1] if files else None

    def figures(self, result: Mapping[str, Any]) -> Sequence[Figures]:
        """The figures of each seed in a result file."""
        return self.read(result) if self.read else list(result["seeds"].values())


def verdict_of(claim: Claim, seeds: Sequence[Figures]) -> str:
    """The verdict by RULE."""
    outcomes = {outcome(difference, seeds) for difference in claim.differences}
    return WRONG if WRONG in outcomes else HOLDS if outcomes == {HOLDS} else OPEN


def outcome(difference: Difference, seeds: Sequence[Figures]) -> str:
    values = [difference.of(figures) for figures in seeds]
    mean = statistics.fmean(values)
    if mean > difference.margin and min(values) > 0:
        return HOLDS
    return WRONG if mean < -difference.margin and max(values) < 0 else OPEN
