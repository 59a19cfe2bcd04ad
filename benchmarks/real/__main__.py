"""Measures what has no result file yet, then writes docs/results/real.md.

    python -m benchmarks.real                    # all experiments of experiments.yaml
    python -m benchmarks.real recovery --seeds 0 1 2

A rehearsal: BENCHMARK_RESULTS=/tmp/results python -m benchmarks.real --steps 2 --work /tmp/real --page /tmp/page

About ten minutes for each run and seed on two idle cores. An interrupted run is continued in the folder WORK.
"""

import argparse
from pathlib import Path

from benchmarks.real.page import FOLDER, write_page
from benchmarks.real.runs import EXPERIMENTS, Run, runs, start_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="Steps of each run, for a rehearsal.")
    parser.add_argument("--work", type=Path, default=Path("runs/real"), metavar="WORK")
    parser.add_argument("--page", type=Path, default=FOLDER, help="Folder of the page.")
    arguments = parser.parse_args()
    if unknown := set(arguments.experiments) - EXPERIMENTS.keys():
        parser.error(f"got {', '.join(sorted(unknown))}, expected some of {', '.join(EXPERIMENTS)}")
    for experiment in arguments.experiments or EXPERIMENTS:
        measure(experiment, arguments.seeds, arguments.work, arguments.steps)
    write_page(arguments.page)


def measure(experiment: str, seeds: list[int], work: Path, steps: int | None) -> None:
    for run in runs(experiment, seeds, work, steps):
        if not start_path(experiment).exists():
            Run(experiment, run.name, 0, work, steps).measure_start()
        if run.result_path.exists():
            print(f"{run.result_path} exists")
        else:
            run.measure()


if __name__ == "__main__":
    main()
