"""Measures what has no result file yet, then writes docs/results/real.md.

    python -m benchmarks.real                    # all experiments of experiments.yaml
    python -m benchmarks.real recovery --runs jsd cross_entropy --seeds 0 1 2

A rehearsal: BENCHMARK_RESULTS=/tmp/results python -m benchmarks.real --steps 2 --work /tmp/real --page /tmp/page

About ten minutes for each run and seed on two idle cores. An interrupted run is continued in the folder WORK.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real.page import FOLDER, write_page
from benchmarks.real.runs import EXPERIMENTS, Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--runs", nargs="+", metavar="RUN", help="Only these runs of the experiments.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="Steps of each run, for a rehearsal.")
    parser.add_argument("--work", type=Path, default=Path("runs/real"), metavar="WORK")
    parser.add_argument("--page", type=Path, default=FOLDER, help="Folder of the page.")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - EXPERIMENTS.keys():
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(EXPERIMENTS)}")
    experiments = arguments.experiments or [*EXPERIMENTS]
    known = {name for experiment in experiments for name in EXPERIMENTS[experiment]["runs"]}
    if unknown := set(arguments.runs or ()) - known:
        parser.error(f"--runs: got {', '.join(sorted(unknown))}, expected some of {', '.join(sorted(known))}")
    if arguments.steps is not None and "BENCHMARK_RESULTS" not in os.environ:
        parser.error("the results of a rehearsal have no meaning: set BENCHMARK_RESULTS to a folder for them")
    for experiment in experiments:
        runs = [
            Run(experiment, name, seed, arguments.work, arguments.steps)
            for seed in arguments.seeds
            for name in arguments.runs or EXPERIMENTS[experiment]["runs"]
            if name in EXPERIMENTS[experiment]["runs"]
        ]
        measure(experiment, runs)
    write_page(arguments.page)


def measure(experiment: str, runs: Sequence[Run]) -> None:
    """Measure the models that an experiment begins with, and those runs that have no result file."""
    for run in runs:
        run.measure_start()
        run.measure()


if __name__ == "__main__":
    main()
