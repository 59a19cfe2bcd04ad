"""Measures what has no result file yet, then writes docs/results/real.md.

    python -m benchmarks.real
    BENCHMARK_RESULTS=/tmp/results python -m benchmarks.real --steps 2 --page /tmp/page   # a rehearsal

About ten minutes for each objective and seed on two idle cores. An interrupted run is continued in the folder WORK.
"""

import argparse
from pathlib import Path

from benchmarks.real.page import FOLDER, write_page
from benchmarks.real.recovery import OBJECTIVES, START, STEPS, measure_start, recover, result_path
from stillhouse.fetch import fetch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=[*OBJECTIVES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--work", type=Path, default=Path("runs/real"), metavar="WORK")
    parser.add_argument("--page", type=Path, default=FOLDER, help="Folder of the page.")
    arguments = parser.parse_args()
    work = arguments.work / f"{arguments.steps}-steps"
    if not START.exists():
        measure_start(fetch("smollm2"), work)
    for seed in arguments.seeds:
        for objective in arguments.objectives:
            if result_path(objective, seed).exists():
                print(f"{result_path(objective, seed)} exists")
            else:
                recover(fetch("smollm2"), work, objective, seed, arguments.steps)
    write_page(arguments.page)


if __name__ == "__main__":
    main()
